"""Reports tell runs apart, whatever they are called."""

from pathlib import Path

import pytest

from ovq.report import markdown, read_results, report
from ovq.runs import write_run

RESULT = {"length": 128, "num_centroids": 8, "setting": "8", "num_sequences": 2, "loss": 1.0,
          "accuracy": 0.5, "state_bytes": 10}  # fmt: skip


def write(folder: Path, name: str, seed: int, **result) -> Path:
    """An evaluated run."""
    results = [RESULT | result, RESULT | result | {"length": 256}]
    write_run(
        folder,
        {"config": {"name": name}, "status": "done", "seed": seed,
         "evaluation": {"results": results}},
    )  # fmt: skip
    return folder


def names(folders: list[Path]) -> list[str]:
    """The runs of the rows, in order."""
    return list(dict.fromkeys(row["run"] for row in read_results(folders)))


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("x", "a", 0), ("y", "b", 0)], ["a", "b"]),
        ([("x", "a", 0), ("y", "a", 1), ("z", "b", 0)], ["a, seed 0", "a, seed 1", "b"]),
        ([("x", "a", 0), ("y", "a", 0)], ["a, x", "a, y"]),
        ([("x", "a", 0), ("y", "a", 0), ("z", "a", 1)], ["a, x", "a, y", "a, z"]),
    ],
)
def test_runs_of_one_recipe_have_labels_of_their_own(tmp_path, runs, expected):
    folders = [write(tmp_path / folder, name, seed) for folder, name, seed in runs]
    assert names(folders) == expected
    labels = {(row["run"], row["label"]) for row in read_results(folders)}
    assert labels == {(name, f"{name}, 8 slots") for name in expected}


def test_folders_of_one_name_are_told_apart_by_their_paths(tmp_path):
    folders = [write(tmp_path / parent / "run", "a", 0) for parent in "xy"]
    assert names(folders) == [f"a, {folder}" for folder in folders]


def test_one_run_given_twice_is_drawn_once(tmp_path, monkeypatch):
    folder, other = write(tmp_path / "x", "a", 0), write(tmp_path / "y", "b", 0)
    monkeypatch.chdir(tmp_path)
    ways = [Path("x"), Path(f"{folder}/"), other, folder, Path("y/../x"), Path("./x")]
    assert names(ways) == ["a", "b"]
    assert len(report(ways, tmp_path / "report").rows) == 4
    assert "From the run files of x, " in (tmp_path / "report/table.md").read_text()


@pytest.mark.parametrize("name", ["index.html", "table.md", "tables.md", "accuracy.png"])
def test_nothing_that_is_no_reports_is_written_over(tmp_path, name):
    folder, output = write(tmp_path / "x", "a", 0), tmp_path / "out"
    output.mkdir()
    (output / name).write_text("precious")
    with pytest.raises(ValueError, match=f"--output must be a new folder .*{name}"):
        report([folder], output)
    assert [path.name for path in output.iterdir()] == [name]
    assert (output / name).read_text() == "precious"


def test_a_report_takes_the_place_of_an_earlier_one_and_leaves_what_is_beside_it(tmp_path):
    folder, output = write(tmp_path / "x", "a", 0), tmp_path / "out"
    report([folder], output)
    (output / "README.md").write_text("precious")
    write(tmp_path / "x", "b", 0)
    report([folder], output)
    assert "| b |" in (output / "table.md").read_text()
    assert (output / "README.md").read_text() == "precious"


def test_a_metric_that_is_no_number_is_shown_so(tmp_path):
    folder = write(tmp_path / "x", "a", 0, loss=float("nan"), accuracy=float("inf"))
    assert "| nan | nan |" in markdown(report([folder], tmp_path).rows)
