"""Evaluation goes on where it was interrupted, and measures nothing twice."""

import json
import shutil
from dataclasses import replace
from threading import Thread

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

import ovq.evaluate
import ovq.measuring
from ovq.evaluate import evaluate, evaluate_points, generate, unmeasured, validate
from ovq.loading import load_run
from ovq.measuring import measure
from ovq.models import OVQForRegression, OVQRegressionConfig
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.points import Point, state_bytes
from ovq.report.run_table import read_results
from ovq.runs import LOCK_FILE, read_run, write_run
from ovq.tasks import ForgettingTask, InContextRegressionTask, Split, TaskDataset
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

    def counted(model, task, num_sequences, **options):
        done.append((task.context_length, model.config.dictionary["num_centroids"]))
        return measure(model, task, num_sequences, **options)

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


def test_two_processes_do_not_write_one_run(folder, measured):
    """The second waits, and finds what the first has measured."""
    asked = {"lengths": (32,), "num_centroids": ("8",), "num_sequences": 2}
    with FileLock(folder / LOCK_FILE):
        second = Thread(target=evaluate, args=(folder,), kwargs=asked)
        second.start()
        second.join(timeout=1.0)
        assert second.is_alive()
        assert measured == settings_of(folder) == []
    second.join(timeout=60.0)
    assert settings_of(folder) == [(32, "8")]


def test_results_of_other_numbers_of_sequences_stay(folder, measured):
    once = {"lengths": (32,), "num_centroids": ("8",)}
    for number in (2, 3, 2, 3):
        evaluate(folder, **once, num_sequences=number)
    assert len(measured) == 2
    assert settings_of(folder) == [(32, "8"), (32, "8")]
    assert [row["num_sequences"] for row in read_results([folder])] == [3]


@pytest.mark.parametrize("change", ["seed", "versions", "device", "again"])
def test_what_was_measured_otherwise_is_measured_again(folder, measured, change):
    once = {"lengths": (32,), "num_centroids": ("8",), "num_sequences": 2}
    evaluate(folder, **once)
    evaluate(folder, **once)
    assert len(measured) == 1
    run = read_run(folder)
    result = run["evaluation"]["results"][0]
    if change == "again":
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


def test_points_ask_for_other_fields_of_the_task_and_are_measured_once(folder, measured):
    points = [
        Point(length=64, setting="8", num_sequences=2, changes={"tokens_per_pair": density})
        for density in (8, 16)
    ]
    assert unmeasured(read_run(folder), points) == points
    results = evaluate_points(folder, points[:1])
    assert unmeasured(read_run(folder), points) == points[1:]
    results += evaluate_points(folder, points)[1:]
    assert unmeasured(read_run(folder), points) == []
    assert len(measured) == 2
    assert [result["changes"] for result in results] == [
        {"tokens_per_pair": 8}, {"tokens_per_pair": 16}
    ]  # fmt: skip
    assert read_run(folder)["evaluation"]["results"] == results
    assert "changes" not in evaluate(folder, lengths=(64,), num_centroids=("8",))[0]
    assert len(read_run(folder)["evaluation"]["results"]) == 3


def test_changes_that_the_task_lacks_are_an_error(folder):
    with pytest.raises(ValueError, match="fields of recall must be among"):
        evaluate_points(folder, [Point(length=32, changes={"colour": 1})])


def test_a_share_of_full_attentions_bytes_is_kept_to(folder):
    (result,) = evaluate(folder, lengths=(256,), num_centroids=("40%",), num_sequences=2)
    config, model = load_run(folder)
    tokens = config.task.without_curriculum().with_length(256).sequence_length
    full = state_bytes(model.config, tokens, layer_pattern=["sliding_window", "full_attention"])
    more = model.config.dictionary | {"num_centroids": result["num_centroids"] + 1}
    assert result["state_bytes"] <= 0.4 * full < state_bytes(model.config, tokens, dictionary=more)
    assert result["setting"] == "40%"
    with pytest.raises(ValueError, match="leave one slot at least, got 1% at a context of 32"):
        evaluate(folder, lengths=(32,), num_centroids=("1%",))


def test_chunks_grow_with_the_context_and_never_shrink(folder, monkeypatch):
    seen = []

    def look(model, task, num_sequences, *, first=0):
        seen.append(dict(model.config.dictionary))
        return measure(model, task, num_sequences, first=first)

    monkeypatch.setattr(ovq.evaluate, "measure", look)
    trained = load_run(folder)[1].config.dictionary["chunk_size"]
    settings = ("40%", "40%:T/8", "8:16", "8")
    results = evaluate(folder, lengths=(256,), num_centroids=settings, num_sequences=2)
    assert [one["chunk_size"] for one in seen] == [trained, 32, 16, trained]
    assert [result.get("chunk_size") for result in results] == [None, 32, 16, None]
    plain, chunked, *_ = results
    assert chunked["num_centroids"] < plain["num_centroids"]  # the chunk's bytes count, too
    assert abs(chunked["state_bytes"] - plain["state_bytes"]) < 0.02 * plain["state_bytes"]
    assert read_run(folder)["evaluation"]["results"] == sorted(
        results, key=lambda result: result["num_centroids"]
    )
    evaluate(folder, lengths=(32,), num_centroids=("8", "8:T/32"), num_sequences=2)
    assert len(seen) == 5  # both mean the trained chunk
    evaluate(folder, lengths=(256,), num_centroids=settings, num_sequences=2)
    assert len(seen) == 5
    for wrong in ("8:", ":8", "8:25%", "8:0", "8:1:1"):
        with pytest.raises(ValueError, match="num_centroids must be a number or a fraction"):
            evaluate(folder, lengths=(32,), num_centroids=(wrong,))


def test_slots_can_be_kept_as_their_first_chunk_left_them(folder, monkeypatch):
    seen = []

    def look(model, task, num_sequences, *, first=0):
        seen.append(dict(model.config.dictionary))
        return measure(model, task, num_sequences, first=first)

    monkeypatch.setattr(ovq.evaluate, "measure", look)
    settings = ("4", "4:kept", "4:16", "4:16:kept", "40%:kept", "4")
    results = evaluate(
        folder, lengths=(128,), num_centroids=settings, num_sequences=2, again=True
    )  # fmt: skip
    rates = [(one["rate"], one["step"]) for one in seen]
    default = (DictionaryConfig.rate, DictionaryConfig.step)
    assert rates == [default, ("constant", 0.0)] * 2 + [("constant", 0.0)]
    assert [result["setting"] for result in results] == list(settings[:-1])
    plain, kept = results[:2]
    assert kept["loss"] != plain["loss"]
    assert kept["state_bytes"] == plain["state_bytes"]
    again = evaluate(folder, lengths=(128,), num_centroids=settings, num_sequences=2)
    assert len(seen) == 5
    assert again == results
    for wrong in ("4:", "kept", "4:kept:16", "4:kept:kept", ":kept"):
        with pytest.raises(ValueError, match="num_centroids must be a number or a fraction"):
            evaluate(folder, lengths=(32,), num_centroids=(wrong,))


def test_chunks_are_as_trained_again_where_the_recipe_names_none(tmp_path):
    config = tiny_run(num_steps=1)
    model = {name: value for name, value in config.model.items() if name != "dictionary"}
    train(replace(config, model=model), tmp_path / "run")
    settings, alone = ("8:256", "16"), tmp_path / "alone"
    shutil.copytree(tmp_path / "run", alone)
    both = evaluate(tmp_path / "run", lengths=(256,), num_centroids=settings, num_sequences=2)
    (last,) = evaluate(alone, lengths=(256,), num_centroids=settings[1:], num_sequences=2)
    assert both[0]["chunk_size"] == 256
    assert both[1] == last


def test_validation_is_measured_once_and_beside_the_evaluation(folder, measured):
    evaluate(folder, lengths=(32,), num_centroids=("8",), num_sequences=4)
    found = validate(folder, num_sequences=4)
    assert validate(folder, num_sequences=4) == found == read_run(folder)["validation"]
    assert len(measured) == 2
    (evaluated,) = read_run(folder)["evaluation"]["results"]
    assert evaluated["num_sequences"] == found["num_sequences"] == 4
    assert evaluated["loss"] != found["loss"]  # other sequences
    assert validate(folder, num_sequences=5)["num_sequences"] == 5


def test_kinds_of_questions_are_scored_apart_and_add_up(folder):
    config, model = load_run(folder)
    task = ForgettingTask(
        context_length=32, first_length=16, tokens_per_pair=4, later_tokens_per_pair=4,
        num_queries=2, num_keys=8, num_later_keys=8, num_values=4, num_filler=4, num_later_filler=4,
    )  # fmt: skip
    found = ovq.measuring.measure(model, task, 3)
    assert {name: group["asked"] for name, group in found["groups"].items()} == {"A": 6, "B": 6}
    for score in ("loss", "accuracy"):
        assert found[score] == pytest.approx(sum(g[score] for g in found["groups"].values()) / 2)
    assert "groups" not in ovq.measuring.measure(model, config.task, 3)


def test_means_are_those_of_the_models_own_loss(folder):
    config, model = load_run(folder)
    task = config.task.without_curriculum()
    batch = TaskDataset(task, num_sequences=3, seed=1, split=Split.EVALUATE).batch(range(3))
    output = model(**batch)
    asked = batch["labels"][:, 1:] != -100
    right = (output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:])[asked]
    found = ovq.measuring.measure(model, task, 3)
    assert found["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx(right.float().mean().item())


def test_errors_of_regression_stand_beside_those_of_the_oracles():
    task = InContextRegressionTask(
        context_length=48, num_features=2, num_functions=3, code_length=4
    )
    torch.manual_seed(0)
    config = OVQRegressionConfig(
        num_inputs=task.num_inputs, hidden_size=16, num_attention_heads=2, num_hidden_layers=1
    )
    model = OVQForRegression(config).eval()
    batch = TaskDataset(task, num_sequences=4, seed=1, split=Split.EVALUATE).batch(range(4))
    found = ovq.measuring.measure(model, task, 4)
    assert found["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    assert found["accuracy"] is None
    assert sum(group["asked"] for group in found["groups"].values()) == 4 * 24
    oracles = found["oracles"]
    assert oracles["least_squares"] < oracles["pooled_least_squares"]
    known = found["groups"]["4-7 earlier"]["oracles"]
    assert known["least_squares"] < 1e-6
    assert known["pooled_least_squares"] > 0.1
    errors = [
        task.errors(example, task.nearest_neighbour(example)).mean().item()
        for example in ({name: x[row] for name, x in batch.items()} for row in range(4))
    ]
    assert oracles["nearest_neighbour"] == pytest.approx(sum(errors) / 4)
