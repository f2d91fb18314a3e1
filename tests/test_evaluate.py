"""Evaluation goes on where it was interrupted, and measures nothing twice."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ovq.evaluate
from ovq.evaluate import evaluate, generate, load_run
from ovq.runs import read_run, write_run
from ovq.train import train

from .tiny import tiny_run

SETTINGS = {"lengths": (32, 64), "num_centroids": ("8", "T/2"), "num_sequences": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_run(num_steps=1), folder)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it that was not evaluated."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def measured(monkeypatch):
    """The lengths and slots of what is measured, in order."""
    done, measure = [], ovq.evaluate.measure

    def counted(model, task, num_sequences):
        done.append((task.context_length, model.config.dictionary["num_centroids"]))
        return measure(model, task, num_sequences)

    monkeypatch.setattr(ovq.evaluate, "measure", counted)
    return done


def settings_of(folder):
    """Those in the run file."""
    return [
        (result["length"], result["setting"])
        for result in read_run(folder).get("evaluation", {}).get("results", [])
    ]


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_an_interrupted_evaluation_loses_one_setting_at_most(folder, measured, stop_at):
    class KilledError(BaseException):
        pass

    def kill(done, total, last):
        if done == stop_at:
            raise KilledError

    with pytest.raises(KilledError):
        evaluate(folder, **SETTINGS, progress=kill)
    assert settings_of(folder) == [(32, "8"), (32, "T/2"), (64, "8"), (64, "T/2")][:stop_at]
    told = []
    results = evaluate(folder, **SETTINGS, known=lambda *numbers: told.append(numbers))
    assert told == [(stop_at, 4)]
    assert measured == [(32, 8), (32, 16), (64, 8), (64, 32)]
    assert results == read_run(folder)["evaluation"]["results"]


def test_a_kill_while_the_run_file_is_written_leaves_it_whole(folder, monkeypatch):
    evaluate(folder, **SETTINGS | {"lengths": (32,)})
    before = (folder / "run.json").read_bytes()

    def kill(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", kill)
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, **SETTINGS)
    assert (folder / "run.json").read_bytes() == before


def test_duplicates_are_measured_once(folder, measured):
    results = evaluate(
        folder, lengths=(32, 32, 64, 32), num_centroids=("T/4", "8", "T/4"), num_sequences=2
    )
    assert measured == [(32, 8), (64, 16), (64, 8)]
    named = [(result["length"], result["setting"]) for result in results]
    assert named == [(32, "T/4"), (32, "8"), (64, "T/4"), (64, "8")]


@pytest.mark.parametrize("change", ["num_sequences", "seed", "versions", "device", "again"])
def test_what_was_measured_otherwise_is_measured_again(folder, measured, change):
    once = {"lengths": (32,), "num_centroids": ("8",), "num_sequences": 2}
    evaluate(folder, **once)
    evaluate(folder, **once)
    assert len(measured) == 1
    run = read_run(folder)
    result = run["evaluation"]["results"][0]
    if change == "num_sequences":
        once["num_sequences"] = 3
    elif change == "again":
        once["again"] = True
    else:
        result["conditions"][change] = "another"
    write_run(folder, run)
    evaluate(folder, **once)
    assert len(measured) == 2
    assert settings_of(folder) == [(32, "8")]


def test_weights_of_another_training_are_refused(folder):
    path = folder / "model/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="RUN must hold the weights that it trained"):
        load_run(folder)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 0.5, "1"])
@pytest.mark.plain
def test_seeds_of_sampling_out_of_range_are_refused(trained, seed):
    _, model = load_run(trained)
    with pytest.raises(ValueError, match=r"seed must (lie in \[0, 2\^63\)|be an integer), got"):
        generate(model, torch.tensor([1]), max_new_tokens=1, temperature=1.0, seed=seed)


def test_a_loss_that_is_no_number_is_null(folder, monkeypatch):
    def measure(model, task, num_sequences):
        found = {"num_sequences": num_sequences, "loss": float("nan"), "accuracy": 0.0}
        return found | {"state_bytes": 1}

    monkeypatch.setattr(ovq.evaluate, "measure", measure)
    evaluate(folder, lengths=(32,))
    text = (folder / "run.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read_run(folder)["evaluation"]["results"][0]["loss"] is None
