"""``ovq experiment``: lists what is planned, runs it, and says how to go on."""

import os
import re
import signal

import pytest

import ovq.experiments
import ovq.experiments.run

from ..test_cli import bad_input, invoke
from .toys import toy_experiment


@pytest.fixture
def toys(monkeypatch):
    """The command runs a toy in place of the suites."""

    def make(suite, scale="demo", *, quick=False):
        return [toy_experiment()]

    monkeypatch.setattr(ovq.experiments, "make_experiments", make)


def test_the_list_shows_entries_minutes_and_status_and_runs_nothing(tmp_path):
    output = tmp_path / "nothing"
    result = invoke("experiment", "all", "--quick", "--list", "-o", output)
    assert result.exit_code == 0, result.output
    for name in ovq.experiments.EXPERIMENTS:
        assert f"{name}: " in result.stdout
    left, whole = re.search(r"about (\d+) minutes left of (\d+),", result.stdout).groups()
    assert left == whole != "0"
    assert f"nothing is in {output} yet; -o names another folder" in result.stdout
    assert not output.exists()


def test_a_suite_runs_and_the_list_says_so(toys, tmp_path):
    result = invoke("experiment", "recall", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "ovq-lr0.01-seed0: trained, validation loss" in result.stdout
    assert "toy: 6 done" in result.stdout
    listed = invoke("experiment", "recall", "--list", "-o", tmp_path).stdout
    (line,) = (line for line in listed.splitlines() if line.startswith("toy: ovq"))
    assert line.split()[3] == "3"
    assert line.split()[-5:] == ["0.0", "3", "0", "0", "0"]
    assert "about 0 minutes left of" in listed


def test_what_is_damaged_is_told_and_the_rest_is_listed(toys, tmp_path, monkeypatch):
    invoke("experiment", "recall", "-o", tmp_path)
    path = tmp_path / "toy/ovq-lr0.01-seed1/run.json"
    path.write_text(path.read_text()[:-20])
    result = invoke("experiment", "recall", "--list", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("toy: ")]
    assert [line.split()[-4:] for line in lines] == [["2", "0", "0", "1"], ["3", "0", "0", "0"]]
    assert "failed: toy/ovq-lr0.01-seed1: RUN must be a whole run.json" in result.stdout
    second = toy_experiment(name="second")
    monkeypatch.setattr(
        ovq.experiments, "make_experiments", lambda *_, **__: [toy_experiment(), second]
    )
    (tmp_path / "second").mkdir()
    (tmp_path / "second/experiment.json").write_text("{")
    result = invoke("experiment", "all", "--list", "-o", tmp_path)
    assert result.exit_code == 2
    assert "toy: full" in result.stdout
    assert "ovq: second: --output must be a whole experiment.json" in result.stderr
    line = bad_input("experiment", "all", "-o", tmp_path)  # before the first suite
    assert "delete this file: it is written anew" in line


def test_a_quick_run_says_that_its_scores_say_nothing(toys, tmp_path):
    said = "its scores say nothing of the models"
    assert said in invoke("experiment", "recall", "--quick", "-o", tmp_path).stdout
    assert said not in invoke("experiment", "recall", "-o", tmp_path).stdout


def test_some_models_of_a_suite_and_later_the_others(toys, tmp_path):
    result = invoke("experiment", "recall", "--only", "full,", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "toy: 3 done, 3 missing" in result.stdout
    assert sorted(path.name for path in (tmp_path / "toy").glob("ovq*")) == []
    result = invoke("experiment", "recall", "-o", tmp_path)
    assert "toy: 6 done" in result.stdout
    assert "full-lr" not in result.stdout


def test_an_interrupt_says_how_to_go_on(toys, tmp_path, monkeypatch):
    train = ovq.experiments.run.train

    def interrupted(config, folder, progress):
        os.kill(os.getpid(), signal.SIGINT)
        return train(config, folder, progress)

    monkeypatch.setattr(ovq.experiments.run, "train", interrupted)
    # A shell that starts the tests in the background has Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = invoke("experiment", "recall", "-o", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert "interrupted: the same command goes on" in result.stdout


def test_failed_runs_are_said_and_the_exit_code_is_not_0(toys, tmp_path, monkeypatch):
    def failing(config, folder, progress):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ovq.experiments.run, "train", failing)
    result = invoke("experiment", "recall", "-o", tmp_path)
    assert result.exit_code == 1
    assert "failed: RuntimeError: out of memory" in result.stdout


def test_bad_input_is_one_line(toys, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("precious")
    assert "--output must be a folder" in bad_input("experiment", "recall", "-o", file)
    (tmp_path / "place").mkdir()
    (tmp_path / "place/toy").write_text("precious")
    for more in ((), ("--list",)):
        line = bad_input("experiment", "recall", *more, "-o", tmp_path / "place")
        assert "--output must be a folder" in line
    message = bad_input("experiment", "recall", "--only", "ovq,gru", "-o", tmp_path / "nothing")
    assert "--only must name some of ovq, full, got 'gru'" in message
    assert not (tmp_path / "nothing").exists()
    monkeypatch.undo()
    assert "SUITE must be one of recall" in bad_input("experiment", "nonsense", "--list")
    assert "--scale must be one of" in bad_input("experiment", "recall", "--scale", "x")
