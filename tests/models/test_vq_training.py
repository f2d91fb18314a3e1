"""Training a model with codebooks: they learn once a forward, whatever is repeated or padded."""

import pytest
import torch
from torch import Tensor

from ovq.layers import vq_attention
from ovq.models import OVQForCausalLM

PATTERN = ["vq", "vq_static_values"]


@pytest.fixture
def make_vq(make_model):
    """A function to a model in training mode, the same weights each time."""
    return lambda **changes: make_model(**({"layer_pattern": PATTERN} | changes)).train()


def codebooks(model: OVQForCausalLM) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers() if "codebook" in name}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def train(model: OVQForCausalLM, token_ids: Tensor, num_steps: int = 1, **inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        outputs = model(token_ids, labels=token_ids, **inputs)
        outputs.loss.backward()
        optimizer.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_loss_in_training_is_that_of_evaluation_and_the_commitment(make_vq, token_ids):
    """Both from the codes that a model starts with."""
    in_training = make_vq()(token_ids, labels=token_ids).loss
    auxiliary = make_vq().model(token_ids).auxiliary_loss
    in_evaluation = make_vq().eval()(token_ids, labels=token_ids).loss
    assert 1e-5 < auxiliary < 1e-2
    torch.testing.assert_close(in_training - in_evaluation, auxiliary, atol=1e-6, rtol=0)
    assert make_vq().eval().model(token_ids).auxiliary_loss is None
    assert make_vq(layer_pattern=["ovq"]).model(token_ids).auxiliary_loss is None


def test_auxiliary_loss_is_the_mean_over_layers(make_vq, token_ids):
    model, losses = make_vq(), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, outputs: losses.append(outputs[2]))
    outputs = model.model(token_ids)
    torch.testing.assert_close(outputs.auxiliary_loss, torch.stack(losses).mean())
    weights = [layer.mixer.k_proj.weight for layer in model.model.layers]
    assert all(g.any() for g in torch.autograd.grad(outputs.auxiliary_loss, weights))


def test_auxiliary_loss_weighs_as_its_tokens_do(make_vq, token_ids):
    """In a micro-batch that has half of the labels, half."""
    labels = token_ids.clone()
    labels[0, :10] = -100
    num_items = (labels[:, 1:] != -100).sum()
    whole = make_vq()(token_ids, labels=labels).loss
    given = make_vq()(token_ids, labels=labels, num_items_in_batch=num_items).loss
    half = make_vq()(token_ids, labels=labels, num_items_in_batch=2 * num_items).loss
    torch.testing.assert_close(given, whole)
    torch.testing.assert_close(half, whole / 2)


def test_what_goes_straight_through_changes_no_loss_and_the_gradients(make_vq, token_ids):
    models = [make_vq(straight_through=name, block_size=2) for name in ("keys", "scores")]
    losses = [model(token_ids, labels=token_ids).loss for model in models]
    torch.testing.assert_close(losses[0], losses[1])
    for layer, other in zip(*(model.model.layers for model in models), strict=True):
        weights = (layer.mixer.k_proj.weight, other.mixer.k_proj.weight)
        grads = [
            torch.autograd.grad(loss, [weight], retain_graph=True)[0]
            for loss, weight in zip(losses, weights, strict=True)
        ]
        assert not torch.allclose(*grads, rtol=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_learns_once(make_vq, token_ids, reentrant, monkeypatch):
    """Gradients, with a commitment's that can be seen, and codebooks over three steps."""
    monkeypatch.setattr(vq_attention, "COMMITMENT_WEIGHT", 1.0)
    found = []
    for checkpointing in (False, True):
        model = make_vq()
        if checkpointing:
            name = "activation_checkpointing_enable"  # renamed in transformers 5
            getattr(model, name, model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
        found.append((train(model, token_ids, 3), codebooks(model)))
    for got, expected in zip(found[1][0], found[0][0], strict=True):
        torch.testing.assert_close(got, expected)
    assert_same(found[1][1], found[0][1])


def test_padding_reaches_no_codebook(make_vq, token_ids):
    """On either side, whatever the pads are: the same learning as from each row by itself."""
    lengths, found = (23, 9, 9), []
    for side, pad in (("right", 0), ("right", 7), ("left", 7)):
        ids, mask = torch.full_like(token_ids, pad), torch.zeros_like(token_ids)
        for row, length in enumerate(lengths):
            place = slice(0, length) if side == "right" else slice(23 - length, 23)
            ids[row, place], mask[row, place] = token_ids[row, :length], 1
        model = make_vq()
        loss = model.model(ids, attention_mask=mask).auxiliary_loss
        found.append({"loss": loss.detach()} | codebooks(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    rows = zip(token_ids, lengths, strict=True)
    alone = [make_vq().model(row[None, :n]).auxiliary_loss * n for row, n in rows]
    torch.testing.assert_close(found[0]["loss"], sum(alone).detach() / sum(lengths))


def test_interrupted_training_goes_on_as_if_not(make_vq, token_ids, tmp_path):
    model = make_vq()
    train(model, token_ids, 3)
    model.save_pretrained(tmp_path)
    loaded = OVQForCausalLM.from_pretrained(tmp_path).train()
    assert_same(codebooks(loaded), codebooks(model))
    for got, expected in zip(train(loaded, token_ids, 2), train(model, token_ids, 2), strict=True):
        torch.testing.assert_close(got, expected)
    assert_same(codebooks(loaded), codebooks(model))


def test_loading_in_bfloat16_keeps_codebooks_in_float32(make_vq, token_ids, tmp_path):
    model = make_vq()
    train(model, token_ids, 3)
    model.save_pretrained(tmp_path)
    loaded = OVQForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert_same(codebooks(loaded), codebooks(model))


def test_evaluation_changes_nothing_and_no_graph_is_kept(make_vq, token_ids):
    model = make_vq()
    train(model, token_ids, 2)
    before = codebooks(model)
    model.eval()
    model(token_ids, labels=token_ids)
    assert_same(codebooks(model), before)
    for layer in model.model.layers:
        assert layer.mixer.auxiliary_loss() is None
        for codebook in layer.mixer.codebooks.values():
            assert codebook.recorded is None or not codebook.recorded.sums.requires_grad


def test_carried_cache_in_training(make_vq, token_ids):
    """Truncated backpropagation: the codebook moves between pieces, the gradient reaches back."""
    model = make_vq()
    first = model(token_ids[:, :9], use_cache=True)
    cache = first["cache"] if "cache" in first else first["past_key_values"]
    outputs = model(token_ids[:, 9:], cache=cache, labels=token_ids[:, 9:])
    outputs.loss.backward()
    assert model.model.embed_tokens.weight.grad.isfinite().all()


@pytest.mark.plain
def test_compiled_training_equals_eager(make_vq, token_ids):
    torch.compiler.reset()
    found = []
    for compiled in (True, False):
        model = make_vq()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(2):
            model.zero_grad()
            run(token_ids, labels=token_ids).loss.backward()
        found.append(([p.grad for p in model.parameters()], codebooks(model)))
    for got, expected in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(got, expected)
    assert_same(found[0][1], found[1][1])
