"""Running an experiment: resumable, each run on its own, chosen by validation, nothing twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

import ovq.evaluate
import ovq.experiments.run
from ovq.evaluate import unmeasured
from ovq.experiments import run_experiment
from ovq.experiments.plan import total_minutes
from ovq.experiments.record import (
    FILE,
    chosen_rate,
    known_failures,
    minutes_left,
    read_trial,
    summarize,
    total_left,
)
from ovq.loading import load_run
from ovq.measuring import EVALUATION_SEED, VALIDATION_START
from ovq.runs import LOCK_FILE, read_run, write_run
from ovq.tasks import Split, TaskDataset
from ovq.train import train

from ..tiny import tiny_run
from .toys import POINTS, toy_experiment

FOLDERS = sorted(
    f"toy/{name}-lr{rate:g}-seed{seed}"
    for name in ("ovq", "full")
    for rate, seed in ((1e-2, 0), (1e-4, 0), (1e-2, 1))
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and record of an experiment that was never interrupted."""
    output = tmp_path_factory.mktemp("experiments") / "whole"
    return output, run_experiment(toy_experiment(), output)


@pytest.fixture
def counted(monkeypatch):
    """What is trained and what is measured, by number."""
    numbers = {"trained": 0, "measured": 0}
    measure, train_run = ovq.evaluate.measure, ovq.experiments.run.train

    def counting_measure(*arguments, **options):
        numbers["measured"] += 1
        return measure(*arguments, **options)

    def counting_train(config, folder, progress):
        def step(*told):
            numbers["trained"] += 1
            progress(*told)

        return train_run(config, folder, step)

    monkeypatch.setattr(ovq.evaluate, "measure", counting_measure)
    monkeypatch.setattr(ovq.experiments.run, "train", counting_train)
    return numbers


def runs_of(output):
    """What the run files say, without what differs between two equal runs."""
    found = {}
    for path in sorted(output.rglob("run.json")):
        run = read_run(path.parent)
        found[str(path.parent.relative_to(output))] = (
            run["status"], run["training"]["losses"], run["validation"],
            run.get("evaluation", {}).get("results"),
        )  # fmt: skip
    return found


def test_every_run_is_an_ordinary_run_and_the_chosen_ones_are_measured(whole):
    output, record = whole
    assert not record["interrupted"]
    assert record["counts"] == {"done": 6}
    assert sorted(runs_of(output)) == FOLDERS
    for entry in record["entries"]:
        assert entry["learning_rate"] == 1e-2
        for run in entry["runs"]:
            config, _ = load_run(output / run["folder"])
            trained = (config.training.learning_rate, config.training.seed)
            assert trained == (run["learning_rate"], run["seed"])
            results = read_run(output / run["folder"]).get("evaluation", {}).get("results", [])
            is_measured = run["learning_rate"] == 1e-2
            assert run["measured"] == is_measured
            assert [r["length"] for r in results] == [p.length for p in POINTS] * is_measured
    written = json.loads((output / "toy" / FILE).read_text())
    assert written == {name: value for name, value in record.items() if name != "interrupted"}


def test_nothing_is_trained_or_measured_twice(whole, counted):
    output, record = whole
    before = runs_of(output)
    again = run_experiment(toy_experiment(), output)
    assert counted == {"trained": 0, "measured": 0}
    assert again["counts"] == record["counts"]
    assert runs_of(output) == before


def test_each_thing_is_done_once(tmp_path, counted):
    run_experiment(toy_experiment(), tmp_path)
    # Six runs of four steps; six validations and two points of four runs.
    assert counted == {"trained": 24, "measured": 6 + 2 * 4}


@pytest.mark.parametrize("stop_at", [7, 24])
def test_an_interrupted_experiment_goes_on_to_the_same_results(whole, tmp_path, counted, stop_at):
    told = []

    def interrupt(done, total, what):
        told.append((done, total))
        if "step" in what and counted["trained"] == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    record = run_experiment(toy_experiment(), tmp_path, progress=interrupt)
    assert record["interrupted"]
    assert record["counts"].get("done", 0) < 6
    assert counted["trained"] <= stop_at + 1
    after = run_experiment(toy_experiment(), tmp_path)
    assert not after["interrupted"]
    assert runs_of(tmp_path) == runs_of(whole[0])
    assert counted["trained"] == 24
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert all(0 <= done <= total + 1e-9 for done, total in told)


def test_an_interrupted_measurement_goes_on(whole, tmp_path, monkeypatch):
    measure, calls = ovq.evaluate.measure, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 4:  # two validations, a point, and now the next
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(ovq.evaluate, "measure", interrupted)
    assert run_experiment(toy_experiment(), tmp_path)["interrupted"]
    (folder,) = (f for f in FOLDERS if f.endswith("ovq-lr0.01-seed0"))
    assert len(unmeasured(read_run(tmp_path / folder), POINTS)) == 1
    assert not run_experiment(toy_experiment(), tmp_path)["interrupted"]
    assert runs_of(tmp_path) == runs_of(whole[0])
    assert len(calls) == 1 + 6 + 2 * 4


def test_a_run_that_fails_is_noted_and_the_others_go_on(whole, tmp_path, monkeypatch):
    def failing(config, folder, progress):
        if folder.name == "ovq-lr0.01-seed0":
            raise RuntimeError("out of\nmemory")
        return train(config, folder, progress)

    monkeypatch.setattr(ovq.experiments.run, "train", failing)
    told = []
    record = run_experiment(
        toy_experiment(), tmp_path, finished=lambda folder, line: told.append((folder.name, line))
    )
    assert record["counts"] == {"done": 5, "failed": 1}
    assert ("ovq-lr0.01-seed0", "failed: RuntimeError: out of memory") in told
    ovq_entry = record["entries"][0]
    assert ovq_entry["learning_rate"] == 1e-4  # the best of those that are left
    assert ovq_entry["runs"][0]["reason"] == "RuntimeError: out of memory"
    assert known_failures(toy_experiment(), tmp_path) == {
        "toy/ovq-lr0.01-seed0": "RuntimeError: out of memory"
    }
    monkeypatch.undo()  # the next call tries again, and chooses anew
    record = run_experiment(toy_experiment(), tmp_path)
    assert record["counts"] == {"done": 6}
    assert record["entries"][0]["learning_rate"] == 1e-2


def test_failures_stay_noted_until_they_are_tried_again(tmp_path, monkeypatch):
    def failing(config, folder, progress):
        if "full" in folder.name:
            raise RuntimeError("out of memory")
        return train(config, folder, progress)

    with monkeypatch.context() as patch:
        patch.setattr(ovq.experiments.run, "train", failing)
        run_experiment(toy_experiment(), tmp_path)
    failed = known_failures(toy_experiment(), tmp_path)
    assert len(failed) == 2
    run_experiment(toy_experiment(), tmp_path, only=("ovq",))
    assert known_failures(toy_experiment(), tmp_path) == failed
    assert run_experiment(toy_experiment(), tmp_path)["counts"] == {"done": 6}


def test_a_run_that_another_process_trains_is_waited_for(whole, tmp_path, monkeypatch):
    """As two suites that share runs do: it is no failure, and no rate is chosen without it."""
    monkeypatch.setattr(ovq.experiments.run, "WAIT", 0.0)
    folder = tmp_path / FOLDERS[0]
    folder.mkdir(parents=True)
    lock = FileLock(folder / LOCK_FILE).acquire()
    waited = []

    def look(done, total, what):
        if "waits" in what:
            waited.append(what)
            lock.lock.release()

    record = run_experiment(toy_experiment(), tmp_path, progress=look)
    assert len(waited) == 1
    assert record["counts"] == {"done": 6}
    assert runs_of(tmp_path).keys() == runs_of(whole[0]).keys()


def test_an_entry_whose_every_run_fails_leaves_the_others(tmp_path, monkeypatch):
    def failing(config, folder, progress):
        if folder.name.startswith("ovq"):
            raise ValueError("no such thing")
        return train(config, folder, progress)

    monkeypatch.setattr(ovq.experiments.run, "train", failing)
    record = run_experiment(toy_experiment(), tmp_path)
    assert record["counts"] == {"done": 3, "failed": 2, "missing": 1}
    assert record["entries"][0]["learning_rate"] is None


KILLED = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from ovq.experiments import run_experiment
from tests.experiments.toys import toy_experiment


def kill(done, total, what):
    if "seed1 step 3" in what:
        os.kill(os.getpid(), signal.SIGKILL)


run_experiment(toy_experiment(), Path(sys.argv[2]), progress=kill)
"""


def test_a_killed_process_loses_nothing_but_steps_since_a_checkpoint(whole, tmp_path, counted):
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(root), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    statuses = summarize(toy_experiment(), tmp_path, {})["counts"]
    assert statuses == {"done": 4, "missing": 1, "unfinished": 1}
    assert not run_experiment(toy_experiment(), tmp_path)["interrupted"]
    assert runs_of(tmp_path) == runs_of(whole[0])
    assert counted["trained"] == 2 + 4  # of a run with a checkpoint at step 2, and of the last one


def test_the_learning_rate_follows_from_validation_data_alone(tmp_path):
    experiment = toy_experiment()
    entry = experiment.entries[0]
    told = {1e-2: (0.5, 0.1, 0.99), 1e-4: (0.4, 0.2, 0.01)}  # validation, training, evaluation
    for trial in experiment.candidates(entry):
        validation, training, accuracy = told[trial.learning_rate]
        result = {"length": 32, "setting": "T/4", "num_centroids": 8, "accuracy": accuracy,
                  "state_bytes": 1}  # fmt: skip
        run = {
            "config": trial.config.to_dict(), "status": "done", "training": {"losses": [training]},
            "evaluation": {"results": [result | {"num_sequences": 2, "loss": training}]},
        }  # fmt: skip
        write_run(tmp_path / trial.folder, run)
        assert chosen_rate(experiment, entry, tmp_path, {}) is None
        write_run(tmp_path / trial.folder, run | {"validation": {"loss": validation}})
    assert chosen_rate(experiment, entry, tmp_path, {}) == 1e-4
    first = experiment.candidates(entry)[1]
    run = read_run(tmp_path / first.folder)
    write_run(tmp_path / first.folder, run | {"validation": {"loss": float("nan")}})
    assert chosen_rate(experiment, entry, tmp_path, {}) == 1e-2


def test_validation_data_is_neither_trained_on_nor_evaluated():
    task = tiny_run().task.without_curriculum()

    def sequences(split, seed, indices, count=2**31 + 300):
        dataset = TaskDataset(task, num_sequences=count, seed=seed, split=split)
        seeds = {dataset._generator(i).initial_seed() for i in indices}
        return seeds, {tuple(dataset[i]["input_ids"].tolist()) for i in indices}

    validation = range(VALIDATION_START, VALIDATION_START + 300)
    seeds, texts = sequences(Split.EVALUATE, EVALUATION_SEED, validation)
    assert len(seeds) == len(texts) == 300
    other_seeds, other_texts = sequences(Split.EVALUATE, EVALUATION_SEED, range(300))
    assert not seeds & other_seeds  # by construction: see TaskDataset
    assert not texts & other_texts
    for seed in (0, 1, 2):
        assert not texts & sequences(Split.TRAIN, seed, range(300))[1]


def test_a_folder_of_another_scale_is_refused(whole):
    with pytest.raises(ValueError, match=r"one scale, got .* of 'demo', not 'quick'"):
        run_experiment(toy_experiment(scale="quick"), whole[0])


def test_a_finished_run_of_another_configuration_is_refused(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "copy")
    first, *others = toy_experiment().entries
    changed = replace(first.config, model=first.config.model | {"ssmax_length": 32})
    other = toy_experiment(entries=(replace(first, config=changed), *others))
    message = r"configuration, got .*toy/ovq-lr.*ssmax_length = None, not 32"
    with pytest.raises(ValueError, match=message):
        run_experiment(other, tmp_path / "copy")
    with pytest.raises(ValueError, match=message):
        read_trial(tmp_path / "copy", other.candidates(other.entries[0])[0])


def test_a_finished_run_without_a_field_has_its_default(whole):
    first, *others = toy_experiment().entries
    assert "ssmax_length" not in first.config.model
    same = replace(first.config, model=first.config.model | {"ssmax_length": None})
    experiment = toy_experiment(entries=(replace(first, config=same), *others))
    assert read_trial(whole[0], experiment.candidates(experiment.entries[0])[0])


@pytest.mark.parametrize("text", ["[", "{}", '{"format": "ovq-experiment", "version": 1}'])
def test_a_damaged_record_is_an_error_that_says_what_to_do(tmp_path, text):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / FILE).write_text(text)
    with pytest.raises(ValueError, match=r"^--output must.*; delete this file: it is written anew"):
        run_experiment(toy_experiment(), tmp_path)


def damage(path):
    path.write_text(path.read_text()[:-20])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_damaged_run_fails_alone_and_is_trained_anew_once_deleted(whole, tmp_path, seed, counted):
    output = tmp_path / "copy"
    shutil.copytree(whole[0], output)
    damaged = output / f"toy/ovq-lr0.01-seed{seed}"
    damage(damaged / "run.json")
    shutil.rmtree(output / "toy/full-lr0.01-seed1")
    record = run_experiment(toy_experiment(), output)
    ours, others = record["entries"]
    assert [run["status"] for run in others["runs"]] == ["done"] * 3
    (failed,) = (run for run in ours["runs"] if run["status"] == "failed")
    assert failed["folder"] == f"toy/ovq-lr0.01-seed{seed}"
    assert "trains it anew once its folder is deleted" in failed["reason"]
    # No other rate takes the place of one that cannot be read.
    assert ours["learning_rate"] == (None if seed == 0 else 1e-2)
    assert counted == {"trained": 4, "measured": 1 + 2}
    shutil.rmtree(damaged)
    assert run_experiment(toy_experiment(), output)["counts"] == {"done": 6}
    assert runs_of(output) == runs_of(whole[0])


def test_minutes_left_are_those_of_what_is_not_done(whole, tmp_path):
    experiment = toy_experiment()
    assert total_left([experiment], tmp_path) == pytest.approx(total_minutes([experiment]))
    assert total_left([experiment], whole[0]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(whole[0], copy)
    shutil.rmtree(copy / "toy/ovq-lr0.01-seed1")
    ours = experiment.entries[0]
    training, measuring = minutes_left(experiment, ours, copy)
    assert (training, measuring) == (ours.training_minutes, ours.evaluation_minutes)
    assert total_left([experiment], copy) == training + measuring
    second = toy_experiment(name="second", entries=(ours,))  # trains nothing of its own
    both = total_left([experiment, second], copy)
    assert both == pytest.approx(training + 2 * measuring)


def test_a_file_in_the_place_of_a_suites_folder_is_refused(tmp_path):
    (tmp_path / "toy").write_text("precious")
    with pytest.raises(ValueError, match=f"--output must be a folder, got {tmp_path}/toy: "):
        run_experiment(toy_experiment(), tmp_path)
    assert (tmp_path / "toy").read_text() == "precious"


def test_two_processes_do_not_run_one_experiment(tmp_path):
    said = []

    def another(done, total, what):
        if not said:
            said.append(what)
            with pytest.raises(ValueError, match="no experiment is running in"):
                run_experiment(toy_experiment(), tmp_path)

    run_experiment(toy_experiment(entries=toy_experiment().entries[1:]), tmp_path, progress=another)
    assert said


def test_shared_runs_lie_in_their_own_suites_folder(whole, tmp_path, counted):
    """A second experiment that shares runs measures its own points, and trains nothing."""
    shutil.copytree(whole[0], tmp_path / "copy")
    entry = toy_experiment().entries[0]
    more = replace(entry, points=(*entry.points, replace(entry.points[0], setting="T/2")))
    record = run_experiment(toy_experiment(name="second", entries=(more,)), tmp_path / "copy")
    assert record["counts"] == {"done": 3}
    assert counted == {"trained": 0, "measured": 2}
    assert (tmp_path / "copy/second" / FILE).is_file()
