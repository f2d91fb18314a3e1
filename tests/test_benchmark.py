"""The benchmark at toy size: its figures are complete, and a wrong implementation gets none."""

import json

import pytest

from ovq import benchmark as bench
from ovq import benchmark_report

TINY = bench.BenchmarkConfig(
    lengths=(64, 128, 256),
    num_centroids=(16, 32),
    implementations=("torch",),
    chunk_size=16,
    head_dim=8,
    num_heads=2,
    num_repeats=1,
    decode_after=(64, 128),
    decode_centroids=16,
    decode_tokens=4,
    memory_lengths=(2048,),
    memory_centroids=16,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    lines = []
    made = bench.benchmark(TINY, folder, lines.append)
    assert len(lines) == TINY.num_steps
    benchmark_report.write(made, folder)
    return folder, made


def test_the_result_is_whole(result):
    folder, made = result
    assert benchmark_report.read_benchmark(folder / "bench.json") == json.loads(json.dumps(made))
    passes = {("forward", "float32"), ("forward+backward", "float32"), ("forward", "bfloat16")}
    assert {(row["pass"], row["dtype"]) for row in made["times"]} == passes
    assert len(made["times"]) == 3 * 3 * (1 + 2)
    assert all(row["median"] > 0 for row in made["times"])
    assert len(made["floors"]) == 2 * 3
    assert {row["impl"] for row in made["memory"]} == {"sdpa", "torch", "autograd"}


def test_table_and_picture(result):
    folder, _ = result
    table = (folder / "table.md").read_text()
    assert "| 256 |" in table
    assert "peak memory" in table
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_implementation_gets_no_figures(monkeypatch, tmp_path):
    right = bench.ovq_attention_with_slots

    def wrong(*args, impl, **kwargs):
        o, state, slots = right(*args, impl=impl, **kwargs)
        return (o * 1.01 if impl == "torch" else o), state, slots

    monkeypatch.setattr(bench, "ovq_attention_with_slots", wrong)
    with pytest.raises(ValueError, match="must equal 'reference'"):
        bench.benchmark(TINY, tmp_path, lambda line: None)
    assert not list(tmp_path.iterdir())


def test_crossover_is_where_it_is_faster_for_good():
    def row(length, impl, number, seconds):
        return {
            "pass": "forward", "dtype": "float32", "length": length, "impl": impl,
            "num_centroids": number, "median": seconds,
        }  # fmt: skip

    times = [row(t, "sdpa", None, s) for t, s in ((1, 1.0), (2, 2.0), (4, 4.0), (8, 16.0))]
    times += [row(t, "cpu", 16, s) for t, s in ((1, 2.0), (2, 1.0), (4, 8.0), (8, 8.0))]
    assert 4 < bench.crossover(times, "cpu", 16) < 8
    slow = [row(1, "sdpa", None, 1.0), row(1, "cpu", 16, 2.0)]
    assert bench.crossover(slow, "cpu", 16) is None


def test_a_foreign_file_is_an_error(tmp_path):
    path = tmp_path / "bench.json"
    for content in ("{", "[]", '{"format": "other"}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="path must be"):
            benchmark_report.read_benchmark(path)
