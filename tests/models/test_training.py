"""Training through transformers: checkpointed activations, Trainer, resuming, compilation."""

import logging

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from ovq.layers import MIXERS
from ovq.models import OVQCache, OVQForCausalLM
from ovq.models.cache import CACHE_FIELD

ALL = {"layer_pattern": list(MIXERS), "num_hidden_layers": len(MIXERS)}
VQ = ["vq", "vq_static_values"]


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 61, (12, 15), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def make_trainer(rows, tmp_path):
    """A function from a model to its trainer: six steps, evaluated and saved along the way."""

    def make(model: OVQForCausalLM, **options) -> Trainer:
        arguments = {
            "output_dir": str(tmp_path), "max_steps": 6, "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3, "report_to": "none", "use_cpu": True,
            "disable_tqdm": True, "learning_rate": 0.01, "save_steps": 3, "seed": 3,
            "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1,
        }  # fmt: skip
        args = TrainingArguments(**(arguments | options))
        return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:5])

    return make


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def enable_checkpointing(model: OVQForCausalLM, reentrant: bool) -> None:
    name = "activation_checkpointing_enable"  # renamed in transformers 5
    enable = getattr(model, name, model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


@pytest.mark.parametrize("pattern", [["sliding_window", "ovq"], VQ, ["mamba2", "mesa_net"]])
def test_resumed_training_equals_an_uninterrupted_run(make_model, make_trainer, tmp_path, pattern):
    """In weights, codebooks, losses and evaluations, to the bit."""
    whole = make_trainer(make_model(layer_pattern=pattern))
    whole.train()
    resumed = make_trainer(make_model(layer_pattern=pattern))
    with torch.no_grad():
        for tensor in resumed.model.state_dict().values():
            tensor.zero_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    found = resumed.model.state_dict()
    for name, tensor in whole.model.state_dict().items():
        assert found[name].equal(tensor), name
    for name in ("loss", "eval_loss"):
        assert logged(resumed, name) == logged(whole, name)
    losses = logged(whole, "eval_loss")
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert whole.evaluate()["eval_loss"] == losses[2]


def test_evaluation_hands_out_logits_and_no_cache(make_model, make_trainer, rows):
    """With labels and without, and whatever the size of the batches."""
    model = make_model(layer_pattern=["ovq", "vq"])
    expected = torch.cat([model(row["input_ids"][None]).logits for row in rows[:5]]).detach()
    for size in (1, 3):
        trainer = make_trainer(model, per_device_eval_batch_size=size)
        for kept in (("input_ids", "labels"), ("input_ids",)):
            given = [{name: row[name] for name in kept} for row in rows[:5]]
            found = trainer.predict(given).predictions
            torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_change_no_gradient(make_model, token_ids, caplog, reentrant):
    """In layers of all mixers; a cache asked for is not returned, as one warning says."""
    found, ids = [], token_ids[:2, :13]
    logging.Logger.warning_once.cache_clear()
    for checkpointing in (False, True):
        model = make_model(**ALL).train()
        if checkpointing:
            enable_checkpointing(model, reentrant)
        for _ in range(2):
            outputs = model(ids, labels=ids, use_cache=True)
            outputs.loss.backward()
            assert isinstance(getattr(outputs, CACHE_FIELD), OVQCache) != checkpointing
        buffers = dict(model.named_buffers())
        found.append({name: p.grad for name, p in model.named_parameters()} | buffers)
        assert sum("no cache is returned" in line for line in caplog.messages) == checkpointing
    assert len(found[0]) > 100
    for name, tensor in found[0].items():
        assert tensor.any() or "codebook" in name, name
        torch.testing.assert_close(found[1][name], tensor, msg=name)


@pytest.mark.plain
def test_compiled_it_is_the_same_and_is_not_compiled_for_every_length(make_model, token_ids):
    torch.compiler.reset()
    model, graphs = make_model(layer_pattern=["ovq"], num_hidden_layers=1), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in (23, 17, 19, 12, 21):
            ids = token_ids[:, :length]
            found, expected = compiled(ids), model(ids)
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
            assert found[CACHE_FIELD].num_bytes == expected[CACHE_FIELD].num_bytes
    assert 1 <= len(graphs) <= 3
