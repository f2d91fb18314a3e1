"""Means, spread and statuses follow from run files; nothing that is lacking is lost."""

import json
from pathlib import Path

import pytest

import ovq.comparison.measure
import ovq.experiments.record
from ovq.report import report
from ovq.report.records import (
    COMPARISON,
    COMPARISON_PARTS,
    EXPERIMENT,
    EXPERIMENT_FILE,
    EXPERIMENT_VERSION,
    read_sources,
    read_suite,
)
from ovq.report.scores import Values, scores_of
from ovq.report.sections.ablations import differences
from ovq.report.sections.base import GAINED, incomplete
from ovq.report.sections.costs import costs
from ovq.report.sections.pairs import recall
from ovq.runs import read_run, write_run

from ..experiments.toys import toy_experiment
from .written import MODELS, OURS, point, recall_result, write_forgetting, write_recall

RESULTS = Path(__file__).parents[2] / "results"


def test_formats_are_those_that_commands_write():
    record = ovq.experiments.record
    assert (EXPERIMENT, EXPERIMENT_VERSION) == (record.FORMAT, record.VERSION)
    assert record.FILE == EXPERIMENT_FILE
    measure = ovq.comparison.measure
    assert measure.FORMAT == COMPARISON
    assert COMPARISON_PARTS.items() <= measure.PARTS.items()


def test_what_an_experiment_writes_is_read(tmp_path):
    record = ovq.experiments.record.write_record(toy_experiment(), tmp_path, {}, None)
    (suite,) = read_sources([tmp_path]).suites
    assert suite.counts == {"done": 0, "unfinished": 0, "missing": 6, "failed": 0}
    assert [score.model for score in scores_of(suite)] == ["ovq", "ovq", "full", "full"]
    assert record["counts"] == {"missing": 6}


def test_every_planned_point_has_a_score_over_its_seeds(tmp_path):
    scores = scores_of(read_suite(write_recall(tmp_path, missing=["ovq-seed2"])))
    assert len(scores) == 8 + 4 + 4  # settings are for dictionaries
    ours = next(s for s in scores if s.model == OURS and s.setting == "25%")
    assert ours.accuracy.by_seed == {0: pytest.approx(0.969), 1: pytest.approx(0.97)}
    assert str(ours.accuracy) == "0.970 ± 0.001 (2 of 3)"
    assert (ours.state_bytes, ours.learning_rate, ours.mixer) == (240, 0.01, "ovq")


@pytest.mark.parametrize(
    ("by_seed", "text"),
    [
        ({}, "0 of 3"),
        ({1: 0.5}, "0.500 (1 of 3)"),
        ({0: 0.0, 1: 0.5, 2: 1.0}, "0.500 ± 0.500"),
        ({0: 0.1, 1: 0.1, 2: 0.4}, "0.200 ± 0.200"),  # the farthest seed, not the half range
    ],
)
def test_a_mean_says_its_spread_and_what_it_lacks(by_seed, text):
    values = Values(by_seed=by_seed, num_planned=3)
    assert str(values) == text
    assert values.is_whole == (len(by_seed) == 3)


def test_a_metric_that_is_no_number_counts_as_lacking(tmp_path):
    def diverged(model, seed, asked):
        return recall_result(model, seed, asked) | ({"accuracy": None} if seed == 1 else {})

    scores = scores_of(read_suite(write_recall(tmp_path, measure=diverged)))
    assert all(sorted(score.accuracy.by_seed) == [0, 2] for score in scores)


def test_statuses_are_those_of_the_run_files(tmp_path):
    """The record says that all are missing."""

    def partly(model, seed, asked):
        return None if (model, seed) == (OURS, 1) and asked["length"] > 128 else recall_result(
            model, seed, asked)  # fmt: skip

    path = write_recall(
        tmp_path,
        measure=partly,
        missing=["ovq-seed2"],
        failed={"linear_attention-seed1": "no way"},
    )
    suite = read_suite(path)
    assert suite.counts == {"done": 9, "unfinished": 1, "missing": 1, "failed": 1}
    folder = tmp_path / "recall/full_attention_nope-lr0.001-seed0"
    write_run(folder, read_run(folder) | {"status": "interrupted"})
    suite = read_suite(path)
    assert suite.counts == {"done": 8, "unfinished": 2, "missing": 1, "failed": 1}
    assert list(incomplete(suite)) == [
        "full_attention_nope: 1 unfinished, of 4 runs",
        "ovq: 1 unfinished, 1 missing, of 4 runs",
        "linear_attention: 1 failed, of 4 runs; recall/linear_attention-lr0.01-seed1: no way",
    ]


def test_one_suite_and_all_of_them_are_read_alike(tmp_path):
    write_recall(tmp_path)
    one, whole = read_sources([tmp_path / "recall"]), read_sources([tmp_path, tmp_path / "recall"])
    assert [suite.counts for suite in one.suites] == [suite.counts for suite in whole.suites]


def test_a_suite_from_two_folders_is_refused(tmp_path):
    for name in "xy":
        write_recall(tmp_path / name)
    with pytest.raises(ValueError, match="each suite once, got recall from"):
        read_sources([tmp_path / "x", tmp_path / "y"])


def damage(path, change):
    """Make a JSON file of ours one that cannot be read."""
    record = json.loads(path.read_text())
    damaged = {
        "truncate": path.read_text()[:-20],
        "foreign": json.dumps(record | {"format": "another"}),
        "newer": json.dumps(record | {"version": 99}),
        "gutted": json.dumps(record | {"entries": [{"name": "x"}], "config": None}),
    }
    path.write_text(damaged[change])


DAMAGES = pytest.mark.parametrize("change", ["truncate", "foreign", "newer", "gutted"])


@DAMAGES
def test_a_damaged_or_foreign_record_is_one_line_that_names_the_file(tmp_path, change):
    path = write_recall(tmp_path)
    damage(path, change)
    with pytest.raises(ValueError, match=r"^RUN must .*" + path.name) as caught:
        read_sources([tmp_path])
    assert "\n" not in str(caught.value)


@DAMAGES
def test_a_run_that_cannot_be_read_has_failed_and_the_others_are_shown(tmp_path, change):
    path = write_recall(tmp_path)
    damage(tmp_path / "recall/ovq-lr0.01-seed1/run.json", change)
    suite = read_suite(path)
    assert suite.counts == {"done": 11, "unfinished": 0, "missing": 0, "failed": 1}
    (line,) = incomplete(suite)
    assert line.startswith("ovq: 1 failed, of 4 runs; recall/ovq-lr0.01-seed1: RUN must")
    assert line.endswith("`ovq experiment` trains it anew once its folder is deleted")
    ours = [score for score in scores_of(suite) if score.model == OURS]
    assert {tuple(sorted(score.accuracy.by_seed)) for score in ours} == {(0, 2)}


def test_a_folder_above_that_of_experiments_is_refused_with_its_name(tmp_path):
    write_recall(tmp_path / "experiments")
    with pytest.raises(ValueError, match=f"got {tmp_path}; {tmp_path}/experiments is one$"):
        read_sources([tmp_path])


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "ovq-compare"}'])
def test_a_damaged_comparison_is_an_error(tmp_path, text):
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json"):
        read_sources([tmp_path])


def test_what_averaging_changes_is_told_seed_by_seed(tmp_path):
    accuracies = {("25%", 0): 0.5, ("25%", 1): 0.7, ("25%:kept", 0): 0.25, ("25%:kept", 1): 0.65}
    asked = [point(128, s, tokens_per_pair=32) for s in ("25%", "25%:kept", "T/2")]
    path = write_recall(
        tmp_path, models={OURS: "ovq"}, missing=["ovq-seed2"], points=asked,
        measure=lambda model, seed, at: {"accuracy": accuracies.get((at["setting"], seed), 0.9)},
    )  # fmt: skip
    section = recall(read_suite(path))
    (table,) = (table for table in section.tables if table.caption.startswith(GAINED))
    (row,) = table.rows
    assert [cell.text for cell in row] == ["ovq", "25%:kept", "0.01", "0.150 ± 0.100 (2 of 3)"]
    drawn = json.dumps([chart.spec for chart in section.charts])
    assert '"T/2"' in drawn
    assert "kept" not in drawn


def test_differences_are_taken_seed_by_seed(tmp_path):
    accuracies = {("ovq", 0): 0.5, ("ovq", 1): 0.7, ("unit", 0): 0.6, ("unit", 1): 0.7}
    path = write_recall(
        tmp_path, "ablations", models={"ovq": "ovq", "unit": "ovq"}, missing=["ovq-seed2"],
        measure=lambda model, seed, _: {"accuracy": accuracies.get((model, seed), 0.9)},
    )  # fmt: skip
    for score, values in differences(scores_of(read_suite(path))):
        assert score.model == "unit"
        assert values.by_seed == {0: pytest.approx(0.1), 1: pytest.approx(0.0)}


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "num_codes", 32),
        ("task", "tokens_per_pair", 4),
        ("training", "num_steps", 300),
        ("evaluation", "seed", 2),
    ],
)
def test_seeds_of_other_models_or_questions_are_refused(tmp_path, part, name, value):
    path = write_recall(tmp_path)
    for seed in (0, 1):  # what both tell is compared; one alone may be older
        folder = tmp_path / f"recall/ovq-lr0.01-seed{seed}"
        run = read_run(folder)
        fields = run["config"].get(part, run.get(part))
        fields[name] = fields.get(name, 1) if seed == 0 else value
        write_run(folder, run)
        if seed == 0:
            read_suite(path)
    with pytest.raises(ValueError, match=rf"ovq-lr0.01-seed1 with {part}.{name} = {value} and"):
        read_suite(path)


def test_a_share_of_state_is_that_of_full_attention_that_is_measured(tmp_path):
    """One that is planned and not begun has no bytes to compare with."""
    unmeasured = [f"full_attention-seed{seed}" for seed in (0, 1, 2)]
    models = MODELS | {"full_attention": "full_attention"}

    def measure(model, seed, asked):
        return None if model == "full_attention" else recall_result(model, seed, asked)

    path = write_recall(tmp_path, models=models, measure=measure, missing=unmeasured)
    table = next(t for t in recall(read_suite(path)).tables if "Bytes" in t.caption)
    assert [row[2].text for row in table.rows if row[0].text == OURS] == ["90 (9%)", "240 (24%)"]


def test_training_that_begins_in_shorter_contexts_is_told(tmp_path):
    path = write_recall(tmp_path)
    for folder in tmp_path.glob("recall/*-seed*"):
        run = read_run(folder)
        run["config"]["training"] |= {"short_length": 32, "short_fraction": 0.7}
        write_run(folder, run)
    note = recall(read_suite(path)).notes[0]
    assert note.startswith("Trained at 32 tokens for 70% of the steps and then at 128 with a pair")


def test_a_record_is_read_from_wherever_one_stands(tmp_path, monkeypatch):
    path = write_recall(tmp_path)
    (tmp_path / "link").symlink_to(path.parent)
    monkeypatch.chdir(path.parent)
    for folder in (Path("."), tmp_path / "link"):
        (suite,) = read_sources([folder]).suites
        assert suite.counts["done"] == 12


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: r["config"]["training"].update(seed=0), "with seed = 0, not 1"),
        (lambda r: r["config"]["training"].update(learning_rate=0.5), "with learning_rate = 0.5"),
        (lambda r: r["config"].update(name="recall-other"), "with name = 'recall-other'"),
        (lambda r: r.update(config={}), "with name = None"),
    ],
)
def test_a_run_that_the_record_does_not_plan_is_refused(tmp_path, change, rule):
    path = write_recall(tmp_path)
    folder = tmp_path / "recall/ovq-lr0.01-seed1"
    run = read_run(folder)
    change(run)
    write_run(folder, run)
    with pytest.raises(ValueError, match=rule):
        read_suite(path)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda r: r.update(name="../../outside"), "with the name '../../outside'"),
        (lambda r: r["entries"][1].update(name="a\u2028b"), "with the name"),
        (lambda r: r["entries"][1].update(name=r["entries"][0]["name"]), "each entry once"),
        (lambda r: r["entries"][1]["runs"][0].update(folder="../../x"), "name runs beside"),
        (lambda r: r["entries"][1]["runs"][0].update(folder="/x"), "name runs beside"),
    ],
)
def test_a_record_that_names_what_is_outside_is_refused(tmp_path, change, rule):
    path = write_recall(tmp_path)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rule):
        read_suite(path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda r: r["evaluation"]["results"][0].pop("accuracy"), "accuracy of result 0 'nothing'"),
        (lambda r: r["evaluation"]["results"][0].update(accuracy="0.5"), "accuracy of result 0"),
        (lambda r: r["evaluation"]["results"][0].update(accuracy=True), "accuracy of result 0"),
        (lambda r: r["evaluation"]["results"][0].update(accuracy=10**400), "accuracy of result 0"),
        (lambda r: r["evaluation"]["results"][0].update(groups={"A": 1}), "groups of result 0"),
        (lambda r: r["evaluation"].update(results=[5]), "result 0 5"),
        (lambda r: r.update(evaluation=[]), "evaluation"),
        (lambda r: r.update(training=None), "training"),
        (lambda r: r.update(weights={"model.safetensors": 5}), "weights"),
        (lambda r: r.update(data=[]), "data"),
        (lambda r: r["config"].update(model=None), "config model"),
        (lambda r: r["training"].update(tokens_per_second="fast"), "training tokens_per_second"),
        (lambda r: r.update(validation={}), "validation"),
    ],
)
def test_a_damaged_part_of_a_run_file_is_named(tmp_path, change, part):
    write_recall(tmp_path)
    folder = tmp_path / "recall/ovq-lr0.01-seed0"
    run = read_run(folder)
    change(run)
    (folder / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=f"whole run.json, got .* with damaged {part}"):
        read_run(folder)


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_what_is_no_number_is_refused(tmp_path, number):
    write_recall(tmp_path)
    path = tmp_path / "recall/ovq-lr0.01-seed0/run.json"
    path.write_text(path.read_text().replace("0.969", number))
    with pytest.raises(ValueError, match=f"whole run.json, got .*{number} is no number"):
        read_run(path.parent)


@pytest.mark.parametrize(
    ("name", "value"),
    [("samples", ["x"]), ("samples", [0]), ("length", "2048"), ("mixer", []), ("mixer", "other")],
)
def test_a_damaged_figure_of_a_comparison_is_shown(tmp_path, name, value):
    record = json.loads((RESULTS / "compare/compare.json").read_text())
    record["figures"][3][name] = value
    (tmp_path / "compare.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"whole compare.json, got .* with the figure"):
        read_sources([tmp_path])


def test_two_comparisons_are_both_drawn_and_what_the_reference_lacks_is_told(tmp_path):
    record = json.loads((RESULTS / "compare/compare.json").read_text())
    longest = max(row["length"] for row in record["figures"])
    for row in record["figures"]:
        if row["mixer"] == record["reference"] and row["length"] == longest:
            row |= {"samples": [], "skipped": "too long"}
    for name in ("a", "b"):
        (tmp_path / name / "compare").mkdir(parents=True)
        (tmp_path / name / "compare/compare.json").write_text(json.dumps(record))
    found = costs([], read_sources([tmp_path / "a/compare", tmp_path / "b/compare"]).comparisons)
    assert found is not None
    names = [chart.name for chart in found.charts]
    assert len(names) == len(set(names)) == 8
    text = found.tables[0].markdown()
    assert f", {longest:,} |" in text
    assert "not measured: too long" in text
    assert "without the reference" in text


def test_whatever_else_is_damaged_is_one_line_that_names_the_record(tmp_path):
    path = write_forgetting(tmp_path)
    for folder in tmp_path.glob("forgetting/*-seed*"):
        run = read_run(folder)
        run["config"]["task"]["first_length"] = 0
        write_run(folder, run)
    with pytest.raises(ValueError, match=f"whole record and whole runs, got {path}"):
        report([tmp_path], tmp_path / "out")
