"""Runs: training, interruption and resuming, evaluation, and the files they leave."""

import json
import logging
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments

from ovq.evaluate import evaluate, generate, held_out_tokens
from ovq.loading import load_run, load_text_model
from ovq.models import OVQForRegression
from ovq.points import num_centroids_at
from ovq.run_config import RunConfig
from ovq.runs import read_run, write_text
from ovq.tasks import InContextRegressionTask, LanguageModelingTask, Split, TaskDataset
from ovq.train import _Watch, collate, latest_checkpoint, make_model, num_tokens, train

from .tiny import STEPS, tiny_run, tiny_text_run


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder and run file of a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train(tiny_run(), folder)


def test_a_run_leaves_its_model_and_its_losses(done):
    folder, run = done
    assert run["status"] == "done"
    assert run["training"]["steps"] == STEPS == len(run["training"]["losses"])
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "model", "run.json"]
    assert read_run(folder)["config"] == tiny_run().to_dict()
    assert RunConfig.from_dict(read_run(folder)["config"]) == tiny_run()


def test_how_long_squared_gradients_are_remembered(done, tmp_path):
    _, run = done
    config = tiny_run()
    long = replace(config, training=replace(config.training, adam_beta2=0.999))
    losses = train(long, tmp_path / "run")["training"]["losses"]
    assert losses[0] == run["training"]["losses"][0]
    assert losses[-1] != run["training"]["losses"][-1]
    old = config.to_dict()
    del old["training"]["adam_beta2"]  # of a run before there was such a field
    assert RunConfig.from_dict(old) == config
    for beta2 in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"adam_beta2 must lie in \[0, 1\)"):
            replace(config.training, adam_beta2=beta2)


def test_no_pickle_is_left(done):
    folder, _ = done
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ""}
    assert (folder / ".lock").read_bytes() == b""


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_an_interrupted_run_resumes_to_the_same_losses(done, tmp_path, stop_at):
    _, whole = done

    def interrupt(step, steps, loss, rate):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    first = train(tiny_run(), tmp_path / "run", interrupt)
    assert first["status"] == "interrupted"
    assert first["training"]["steps"] < STEPS
    second = train(tiny_run(), tmp_path / "run")
    assert second["status"] == "done"
    assert second["training"]["losses"] == whole["training"]["losses"]


def test_a_killed_save_does_not_stop_the_resume(done, tmp_path):
    _, whole = done
    folder = tmp_path / "run"

    class KilledError(Exception):
        pass

    def kill(step, steps, loss, rate):
        if step == 5:
            raise KilledError

    with pytest.raises(KilledError):
        train(tiny_run(), folder, kill)
    assert latest_checkpoint(folder).name == "step-3"
    half = folder / "checkpoints" / "partial" / "checkpoint-5"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    assert train(tiny_run(), folder)["training"]["losses"] == whole["training"]["losses"]


def interrupted(config, folder, stop_at=4):
    """A run stopped after some steps, with a checkpoint."""

    def interrupt(step, steps, loss, rate):
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGINT)

    assert train(config, folder, interrupt)["status"] == "interrupted"
    return latest_checkpoint(folder)


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


def test_a_damaged_file_of_a_checkpoint_is_named_and_its_remedy_works(done, tmp_path):
    """Cut off, with one other byte, or gone."""
    folder = tmp_path / "run"
    checkpoint = interrupted(tiny_run(), folder)
    for name in [*FILES, "sha256.json"]:
        path = checkpoint / name
        whole = path.read_bytes()
        flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        for content in (whole[: len(whole) // 2], flipped, None):
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"{checkpoint}.*") as caught:
                train(tiny_run(), folder)
            assert name in str(caught.value) or name == "sha256.json"
            assert f"delete {checkpoint}" in str(caught.value)
            assert "\n" not in str(caught.value)
            path.write_bytes(whole)
    shutil.rmtree(checkpoint)
    assert train(tiny_run(), folder)["training"]["losses"] == done[1]["training"]["losses"]


def test_a_text_that_changed_stops_the_resume_and_says_what_changed(tmp_path):
    source, folder = tmp_path / "texts", tmp_path / "run"
    source.mkdir()
    text = "in the beginning " * 40
    (source / "a.txt").write_text(text)
    (source / "b.txt").write_text(text)
    interrupted(tiny_text_run(source), folder)
    for change, said in (
        ({"a.txt": text + "x"}, "a.txt with 681 bytes, not 680"),
        ({"a.txt": text.upper()}, "a.txt with other bytes"),
        ({"c.txt": text}, "c.txt added"),
        ({"b.txt": None}, "b.txt removed"),
    ):
        for name, content in change.items():
            path = source / name
            path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ValueError, match=f"what the run began with, got {said}"):
            train(tiny_text_run(source), folder)
        for name in ("a.txt", "b.txt"):
            (source / name).write_text(text)
        (source / "c.txt").unlink(missing_ok=True)
    assert train(tiny_text_run(f"{source}/"), folder)["status"] == "done"
    assert load_run(folder)[0].task.source == str(source)
    (source / "a.txt").write_text(text.upper())
    with pytest.raises(ValueError, match=r"what the run began with, got a.txt with other bytes"):
        load_run(folder)
    with pytest.raises(ValueError, match=r"what the run began with, got a.txt with other bytes"):
        evaluate(folder)


def test_a_folder_with_and_without_a_slash_is_one_source_and_another_is_not(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("in the beginning " * 40)
    shutil.copytree(tmp_path / "texts", tmp_path / "copy")
    folder = tmp_path / "run"
    interrupted(tiny_text_run(tmp_path / "texts"), folder)
    with pytest.raises(ValueError, match=r"task.source = "):
        train(tiny_text_run(tmp_path / "copy"), folder)
    monkeypatch.chdir(tmp_path)
    assert train(tiny_text_run("texts/"), folder)["status"] == "done"


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, 1.5, "3", None, True])
def test_seeds_out_of_range_are_refused_before_anything_is_written(tmp_path, seed):
    config = tiny_run()
    object.__setattr__(config.training, "seed", seed)
    with pytest.raises(ValueError, match=r"seed must (lie in \[0, 2\^32\)|be an integer), got"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_losses_that_are_no_numbers_are_null_in_the_run_file(tmp_path):
    config = tiny_run(learning_rate=1e30, num_steps=4, warmup_steps=0)
    model = config.model | {"layer_pattern": ["sliding_window"]}
    run = train(replace(config, model=model), tmp_path / "run")
    assert run["status"] == "done"
    assert None in run["training"]["losses"]
    text = (tmp_path / "run/run.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_run_that_is_done_is_not_trained_again(done):
    folder, run = done
    before = (folder / "run.json").read_bytes()
    assert train(tiny_run(), folder) == run
    assert (folder / "run.json").read_bytes() == before


def test_a_folder_of_another_configuration_is_refused(done):
    folder, _ = done
    with pytest.raises(ValueError, match=r"training.seed = 0, not 7"):
        train(tiny_run(seed=7), folder)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="--output must be a new or empty folder"):
        train(tiny_run(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_bad_source_leaves_no_folder(tmp_path):
    task = LanguageModelingTask(source=str(tmp_path / "nowhere"), context_length=16)
    with pytest.raises(ValueError, match="nowhere"):
        train(replace(tiny_run(), task=task), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluation_takes_any_length_and_any_number_of_centroids(done):
    folder, _ = done
    results = evaluate(folder, lengths=(32, 64), num_centroids=("8", "T/4", "T/2"), num_sequences=2)
    settings = [(result["length"], result["num_centroids"]) for result in results]
    assert settings == [(32, 8), (32, 8), (32, 16), (64, 8), (64, 16), (64, 32)]
    assert all(0 <= result["accuracy"] <= 1 and result["loss"] > 0 for result in results)
    assert results[5]["state_bytes"] > results[3]["state_bytes"]
    again = evaluate(folder, lengths=(64,), num_centroids=("T/2",), num_sequences=2, again=True)
    assert again == results[5:]
    assert len(read_run(folder)["evaluation"]["results"]) == len(results)


@pytest.mark.parametrize("setting", ["0", "T", "T/0", "-1", "1.5", "many"])
def test_settings_of_centroids_are_checked(setting):
    with pytest.raises(ValueError, match="num_centroids must be a number or a fraction"):
        num_centroids_at(setting, 128)


def test_generation_keeps_the_size_of_the_state(done):
    _, model = load_run(done[0])
    prompt = held_out_tokens(tiny_run().task, 40)
    new, before, after = generate(model, prompt, max_new_tokens=9, temperature=0.0)
    assert len(new) == 9
    assert before == after == model.state_size(49)
    ids = prompt.tolist()
    for token in new:  # the same without a cache
        logits = model(torch.tensor([ids]), use_cache=False).logits
        assert logits[0, -1].argmax().item() == token
        ids.append(token)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_text(path, "old")

    def stop(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("{", "whole run.json"),
        ("[]", "format 'ovq-run'"),
        ('{"format": "other"}', "format 'ovq-run'"),
        ('{"format": "ovq-run", "version": 1}', "damaged config"),
        ('{"format": "ovq-run", "version": 99, "config": {}, "status": "done"}', "update ovq"),
    ],
)
def test_a_foreign_run_file_is_an_error(tmp_path, content, rule):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=rule):
        read_run(tmp_path)


def test_a_damaged_model_is_an_error(done, tmp_path):
    source, _ = done
    (tmp_path / "model").mkdir()
    for name in ("run.json", "model/config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    weights = (source / "model/model.safetensors").read_bytes()
    (tmp_path / "model/model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="RUN must hold a whole model"):
        load_run(tmp_path)


def test_a_model_of_another_configuration_is_an_error(done, tmp_path):
    source, _ = done
    (tmp_path / "model").mkdir()
    for path in (source / "model").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    run = json.loads((source / "run.json").read_text())
    run["config"]["model"]["window_size"] = 5
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="window_size = 4, not 5"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("ssmax_length", 32, "ssmax_length = 32, not None"),
        ("dictionary", None, "dictionary = "),
        ("dtype", "bfloat16", "dtype = torch.bfloat16, not torch.float32"),
    ],
)
def test_an_edited_field_that_the_run_leaves_to_its_default_is_an_error(
    done, tmp_path, field, value, rule
):
    shutil.copytree(done[0], tmp_path / "run")
    path = tmp_path / "run/model/config.json"
    config = json.loads(path.read_text())
    assert field == "dictionary" or field not in tiny_run().model
    assert "centroid" not in tiny_run().model["dictionary"]
    config[field] = value or config["dictionary"] | {"centroid": "unit"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rule):
        load_run(tmp_path / "run")


def test_a_model_that_lacks_a_tensor_is_an_error(done, tmp_path):
    from safetensors.torch import load_file, save_file

    source, _ = done
    (tmp_path / "model").mkdir()
    for name in ("run.json", "model/config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model/model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys \['model.norm.weight'\]"):
        load_run(tmp_path)


def test_checkpoints_without_their_run_file_are_refused(tmp_path):
    """They may be of any configuration."""
    (tmp_path / "checkpoints/step-3").mkdir(parents=True)
    with pytest.raises(ValueError, match="new or empty folder or a run"):
        train(tiny_run(), tmp_path)


def test_the_log_of_the_end_is_no_step(tmp_path):
    """A run that was stopped after its last step is gone on with for none."""
    watch = _Watch(tiny_run(), None)
    watch.begun, watch.tokens_per_second = time.perf_counter(), 7.0
    state = TrainerState(global_step=4, max_steps=4, log_history=[{"train_runtime": 1.0}])
    called = TrainingArguments(output_dir=str(tmp_path), use_cpu=True), state, TrainerControl()
    watch.on_log(*called)
    assert watch.tokens_per_second == 7.0
    state.log_history.append({"loss": 1.0})
    watch.on_log(*called)
    assert watch.tokens_per_second > 7.0


def test_two_runs_do_not_train_in_one_folder(tmp_path):
    folder = tmp_path / "run"

    def another(step, steps, loss, rate):
        if step == 1:
            with pytest.raises(ValueError, match="no run is training in"):
                train(tiny_run(), folder)

    assert train(tiny_run(), folder, another)["status"] == "done"


def test_a_done_run_without_its_model_is_an_error(done, tmp_path):
    (tmp_path / "run.json").write_bytes((done[0] / "run.json").read_bytes())
    with pytest.raises(ValueError, match="--output must hold the model of its run"):
        train(tiny_run(), tmp_path)


@pytest.mark.parametrize("mixer", ["ovq", "vq"])
def test_logits_of_the_labelled_tokens_alone_give_the_same_loss_and_gradients(mixer):
    config = tiny_run()
    config = replace(config, model=config.model | {"layer_pattern": ["sliding_window", mixer]})
    dataset = TaskDataset(config.task, num_sequences=3, seed=0, split=Split.TRAIN)
    found = []
    for batch in (dataset.batch(range(3)), collate([dataset[i] for i in range(3)])):
        model = make_model(config).train()
        num_items = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        found.append((loss, [x.grad for x in model.parameters()]))
    assert batch["logits_to_keep"].numel() < batch["input_ids"].shape[1] // 2
    torch.testing.assert_close(found[0], found[1])


def test_batches_with_labels_everywhere_are_left_as_they_are():
    ids = torch.arange(6)
    batch = collate([{"input_ids": ids, "labels": ids}] * 2)
    assert sorted(batch) == ["input_ids", "labels"]
    assert batch["labels"].tolist() == [ids.tolist()] * 2


def test_frozen_parameters_keep_their_values_and_the_others_do_not(tmp_path):
    config = tiny_run(frozen=("log_beta",))
    before = make_model(config).state_dict()
    train(config, tmp_path / "run")
    found = load_run(tmp_path / "run")
    after = found[1].state_dict()
    assert found[0] == config
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if not name.endswith("log_beta")}


def test_a_name_to_freeze_that_no_parameter_has_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"frozen must hold last parts of .*, got 'beta'"):
        train(tiny_run(frozen=("beta",)), tmp_path / "run")


def test_layers_stay_the_identity_until_it_is_their_turn(tmp_path):
    config = tiny_run(identity_fraction=4 / STEPS)
    config = replace(config, model=config.model | {"num_identity_layers": 1})
    before = {n: p.detach().clone() for n, p in make_model(config).named_parameters()}
    checkpoint = interrupted(config, tmp_path / "run", 3)
    assert checkpoint.name == "step-4"
    half = load_file(checkpoint / "model.safetensors")
    kept = {name for name in before if before[name].equal(half[name])}
    assert kept == {name for name in before if ".layers.0." in name}
    resumed = train(config, tmp_path / "run")
    after = load_run(tmp_path / "run")[1].state_dict()
    assert not [name for name in before if before[name].equal(after[name])]
    whole = train(config, tmp_path / "whole")
    assert resumed["training"]["losses"] == whole["training"]["losses"]


def test_a_run_begins_with_short_contexts_and_goes_on_where_it_stopped(tmp_path):
    config = tiny_run(short_length=8, short_fraction=4 / STEPS)
    whole = train(config, tmp_path / "whole")
    short, long = 4 * (8 + 1 + 2), 32 + 1 + 2 * 2  # one pair in 8 tokens, asked for
    sequences = 2
    assert num_tokens(config, 3) == 3 * sequences * short
    assert num_tokens(config, STEPS) == sequences * (4 * short + (STEPS - 4) * long)
    interrupted(config, tmp_path / "run", 3)
    assert train(config, tmp_path / "run")["training"]["losses"] == whole["training"]["losses"]
    usual = train(tiny_run(), tmp_path / "usual")
    assert usual["training"]["losses"] != whole["training"]["losses"]


def test_shares_of_training_out_of_range_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"short_fraction must lie in \[0, 1\], got 1.5"):
        tiny_run(short_fraction=1.5)
    with pytest.raises(ValueError, match="short_length must divide context_length = 32, got 12"):
        train(tiny_run(short_length=12), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_share_of_training_with_the_identity_is_below_1():
    with pytest.raises(ValueError, match=r"identity_fraction must lie in \[0, 1\), got 1.0"):
        tiny_run(identity_fraction=1.0)


def test_a_run_file_without_newer_fields_is_gone_on_with(done, tmp_path):
    folder = tmp_path / "run"
    interrupted(tiny_run(), folder)
    run = json.loads((folder / "run.json").read_text())
    for name in (
        "frozen",
        "identity_fraction",
        "short_length",
        "accumulation_steps",
        "bf16",
        "gradient_checkpointing",
    ):
        del run["config"]["training"][name]
    (folder / "run.json").write_text(json.dumps(run))
    assert train(tiny_run(), folder)["training"]["losses"] == done[1]["training"]["losses"]


def test_sequences_that_parts_cannot_share_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size must be a multiple of .* = 4, got 2"):
        train(tiny_run(accumulation_steps=4), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parts_of_a_step_make_the_step(done, tmp_path):
    run = train(tiny_run(accumulation_steps=2), tmp_path / "run")
    assert run["training"]["losses"] == pytest.approx(done[1]["training"]["losses"], rel=1e-4)


def test_tied_embeddings_resume_without_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    config = tiny_run(curriculum=False)
    config = replace(config, model={**config.model, "tie_word_embeddings": True})
    whole = train(config, tmp_path / "whole")
    interrupted(config, tmp_path / "run")
    caplog.clear()
    assert train(config, tmp_path / "run")["training"]["losses"] == whole["training"]["losses"]
    assert "missing keys" not in caplog.text
    saved = [load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "run")]
    assert saved[0].keys() == saved[1].keys()
    assert "lm_head.weight" not in saved[0]


def test_a_model_of_numbers_is_trained_and_resumed(tmp_path):
    task = InContextRegressionTask(
        context_length=32, num_features=2, num_functions=2, code_length=4
    )
    config = replace(tiny_run(curriculum=False), task=task)
    whole = train(config, tmp_path / "whole")
    interrupted(config, tmp_path / "run")
    assert train(config, tmp_path / "run")["training"]["losses"] == whole["training"]["losses"]
    found, model = load_run(tmp_path / "run")
    assert found == config
    assert isinstance(model, OVQForRegression)
    with pytest.raises(ValueError, match="RUN must be of a model of tokens"):
        load_text_model(tmp_path / "run")
