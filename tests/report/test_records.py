"""Means, spread and statuses follow from run files; nothing that is lacking is lost."""

import json

import pytest

import ovq.comparison.measure
import ovq.experiments.record
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
from ovq.report.sections.base import incomplete
from ovq.report.sections.pairs import recall
from ovq.runs import read_run, write_run

from ..experiments.toys import toy_experiment
from .written import MODELS, OURS, recall_result, write_recall


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


@pytest.mark.parametrize("file", ["recall/experiment.json", "recall/ovq-lr0.01-seed0/run.json"])
@pytest.mark.parametrize("change", ["truncate", "foreign", "newer", "gutted"])
def test_a_damaged_or_foreign_record_is_one_line_that_names_the_file(tmp_path, file, change):
    write_recall(tmp_path)
    path = tmp_path / file
    record = json.loads(path.read_text())
    damaged = {
        "truncate": path.read_text()[:-20],
        "foreign": json.dumps(record | {"format": "another"}),
        "newer": json.dumps(record | {"version": 99}),
        "gutted": json.dumps(record | {"entries": [{"name": "x"}], "config": None}),
    }
    path.write_text(damaged[change])
    with pytest.raises(ValueError, match=r"^RUN must .*" + path.name) as caught:
        read_sources([tmp_path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "ovq-compare"}'])
def test_a_damaged_comparison_is_an_error(tmp_path, text):
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json"):
        read_sources([tmp_path])


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
