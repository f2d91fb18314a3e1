"""The loop over samples: resumable, and honest about what it is given."""

import json
from dataclasses import replace

import pytest

from ovq.fidelity import FidelityConfig, measure, zipf_keys
from ovq.fidelity.measure import drawn_samples, read_fidelity
from ovq.fidelity.report import main_table, markdown, memory_table, write

CONFIG = FidelityConfig(length=1024, num_centroids=(128,), seeds=(0,), num_repeats=1)


def samples():
    return [zipf_keys(1024, seed, num_heads=1, head_dim=8) for seed in (0, 1)], 2


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return measure(CONFIG, samples(), tmp_path_factory.mktemp("whole") / "fidelity.json")


def test_every_method_at_the_main_memory_and_some_at_all(result):
    found = {(row["method"], row["num_centroids"]) for row in result["errors"]}
    methods = result["methods"]
    assert found == {(name, 64) for name in methods} | {
        (name, 128) for name in methods if methods[name]["swept"]
    }
    assert result["status"] == "done"
    assert len(result["errors"]) == 2 * len(found)


def test_an_interrupted_measurement_goes_on(result, tmp_path):
    path = tmp_path / "fidelity.json"
    seen = []

    def interrupt(done, total, row):
        seen.append(row)
        if row["part"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(CONFIG, samples(), path, interrupt)
    kept = read_fidelity(path)
    assert kept["status"] == "unfinished"
    assert {row["part"] for row in kept["errors"]} == {0}
    again = []
    whole = measure(CONFIG, samples(), path, lambda done, total, row: again.append((done, row)))
    assert {row["part"] for _, row in again} == {1}
    assert again[-1][0] == len(whole["errors"])
    assert whole["errors"] == result["errors"]


def test_another_configuration_or_file_is_refused(result, tmp_path):
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match="output must be empty or of the same configuration"):
        measure(replace(CONFIG, seeds=(1,)), samples(), path)
    path.write_text(json.dumps(result)[:-50])
    with pytest.raises(ValueError, match=r"whole fidelity\.json"):
        measure(CONFIG, samples(), path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="that ovq fidelity wrote"):
        measure(CONFIG, samples(), path)


@pytest.mark.parametrize("fields", [{"length": 100}, {"length": 1030}, {"num_centroids": (0,)}])
def test_sizes_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        FidelityConfig(**fields)


def test_drawn_samples_are_those_of_their_seeds():
    first, again = ([*drawn_samples(replace(CONFIG, seeds=(0, 3)))] for _ in range(2))
    assert [(s.distribution, s.part) for s in first] == [
        ("random", 0), ("random", 3), ("zipf", 0), ("zipf", 3),
    ]  # fmt: skip
    assert all(a.k.equal(b.k) and a.q.equal(b.q) for a, b in zip(first, again, strict=True))
    assert not first[2].k.equal(first[3].k)


def test_the_tables_say_what_the_file_says(tmp_path):
    def rows(method, error):
        return [
            {"distribution": d, "part": p, "method": method, "num_centroids": n, "num_bytes": 1,
             "error": error + 0.1 * p}
            for d in ("a", "b") for p in (0, 1) for n in (64, 128)
        ]  # fmt: skip

    result = {
        "config": {"length": 1024, "model": None, "text": None},
        "methods": {
            "base": {"doc": "x", "dictionary": {}, "swept": True},
            "other": {"doc": "y", "dictionary": {}, "swept": True},
        },
        "errors": rows("base", 0.35) + rows("other", 0.15),
        "times": [{"method": "base", "median": 2.0}, {"method": "other", "median": 3.0}],
    }
    assert "| other | y | 0.200 ± 0.071 (-50 %) |" in main_table(result, "base")
    assert "| base | 0.400 | 0.400 |" in memory_table(result, "b")
    assert "base 1.00, other 1.50" in markdown(result)
    write(result, tmp_path)
    assert (tmp_path / "table.md").read_text() == markdown(result)
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
