"""The loop over samples: resumable, and honest about what it is given."""

import json
from dataclasses import replace

import pytest

from ovq.fidelity import FidelityConfig, measure, zipf_keys
from ovq.fidelity.measure import begun, drawn_samples
from ovq.fidelity.record import alone, read_fidelity
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
    with pytest.raises(ValueError, match="of format 'ovq-fidelity'"):
        measure(CONFIG, samples(), path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"config": None}, "config"),
        ({"methods": []}, "methods"),
        ({"methods": {"ovq, paper": {}}}, "methods"),
        ({"status": None}, "status"),
        ({"errors": None}, "errors"),
        ({"errors": [{}]}, "errors"),
        ({"errors": [7]}, "errors"),
        ({"errors": ["no such method"]}, "errors"),
        ({"times": [{}]}, "times"),
    ],
)
def test_a_damaged_file_is_refused_by_the_name_of_its_part(result, tmp_path, changes, part):
    path = tmp_path / "fidelity.json"
    if changes == {"errors": ["no such method"]}:
        changes = {"errors": [result["errors"][0] | {"method": "no such method"}]}
    path.write_text(json.dumps(result | changes))
    with pytest.raises(ValueError, match=f"with damaged {part}"):
        measure(CONFIG, samples(), path)
    path.write_text('{"format": "ovq-fidelity"}')
    with pytest.raises(ValueError, match="with damaged config"):
        measure(CONFIG, samples(), path)


def none_is_measured(done, total, row):
    raise AssertionError(row)


def test_a_finished_measurement_needs_no_samples(result, tmp_path):
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(result))
    before = path.stat().st_mtime_ns
    assert begun(CONFIG, path)["status"] == "done"
    assert measure(CONFIG, (iter([]), 0), path, none_is_measured) == result
    assert path.stat().st_mtime_ns == before


def test_a_sample_that_lacks_a_setting_is_measured_again(result, tmp_path):
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(result | {"errors": result["errors"][:-1], "status": "unfinished"}))
    seen = []
    whole = measure(CONFIG, samples(), path, lambda done, total, row: seen.append(row["part"]))
    assert set(seen) == {1}
    assert whole["errors"] == result["errors"]


def test_methods_that_have_changed_since_are_refused_but_for_their_words(result, tmp_path):
    path, name = tmp_path / "fidelity.json", "ovq, paper"
    reworded = result["methods"][name] | {"doc": "in other words"}
    path.write_text(json.dumps(result | {"methods": result["methods"] | {name: reworded}}))
    begun(CONFIG, path)
    other = result["methods"][name] | {"dictionary": {"chunk_size": 32}}
    fewer = {n: method for n, method in result["methods"].items() if n == name}
    for methods in (result["methods"] | {name: other}, fewer, result["methods"] | {"x": reworded}):
        rows = [row for row in result["errors"] if row["method"] in methods]
        times = [row for row in result["times"] if row["method"] in methods]
        held = result | {"methods": methods, "errors": rows, "times": times}
        path.write_text(json.dumps(held))
        with pytest.raises(ValueError, match="of the same methods"):
            begun(CONFIG, path)


def test_a_text_or_model_that_has_changed_since_is_refused(tmp_path):
    path, data = tmp_path / "fidelity.json", {"text": {"bytes": 3, "sha256": "a"}}
    (tmp_path / "fidelity.json").write_text(json.dumps(begun(CONFIG, path, data)))
    assert begun(CONFIG, path, data)["data"] == data
    with pytest.raises(ValueError, match="began with, got another model/x, text: give another"):
        begun(CONFIG, path, {"text": {"bytes": 3, "sha256": "b"}, "model/x": {}})
    older = {name: part for name, part in begun(CONFIG, path, data).items() if name != "data"}
    path.write_text(json.dumps(older))
    begun(CONFIG, path, data)  # of a version that kept none


def test_two_runs_do_not_share_a_folder(tmp_path):
    path = tmp_path / "out" / "fidelity.json"
    with alone(path.parent), pytest.raises(ValueError, match="no other run writes to"):
        measure(CONFIG, samples(), path)
    assert not path.exists()
    with alone(path.parent):
        pass  # free again


def test_the_file_is_there_before_the_first_sample(tmp_path):
    path, seen = tmp_path / "fidelity.json", []

    def looking():
        seen.append(read_fidelity(path)["errors"])
        yield from ()

    measure(replace(CONFIG, seeds=()), (looking(), 0), path)
    assert seen == [[]]


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 100}, {"length": 1030}, {"num_centroids": (0,)}, {"seeds": (1, 1)},
        {"seeds": (-1,)}, {"num_repeats": 0},
    ],
)  # fmt: skip
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
