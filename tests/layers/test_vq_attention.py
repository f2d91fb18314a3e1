"""What the VQ layers promise beyond the contract."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ovq.layers import VQAttention, build_mixer, codebook_health
from ovq.layers.vq_attention import COMMITMENT_WEIGHT
from ovq.ops.quantization import nearest_codes
from ovq.ops.vq_attention import vq_attention


@pytest.fixture(params=["vq", "vq_static_values"])
def layer(request, config) -> VQAttention:
    torch.manual_seed(0)
    return build_mixer(request.param, config, 0)


def train(layer: VQAttention, x: Tensor, num_forwards: int = 1) -> VQAttention:
    for _ in range(num_forwards):
        layer.begin_training_forward()
        layer(x)
        layer.end_training_forward()
    return layer


def projections(layer: VQAttention, x: Tensor) -> list[Tensor]:
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]


def test_the_layer_is_the_operator_between_projections(layer):
    x = torch.randn(2, 20, 32)
    train(layer, x, 3)
    q, k, v = projections(layer, x)
    if layer.value_codebook is not None:
        codes = layer.value_codebook.codes
        v = codes[torch.arange(2), nearest_codes(v, codes)]
    o, _ = vq_attention(q, k, v, torch.full((4,), 8.0), layer.key_codebook.codes, block_size=3)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


def test_static_values_differ_and_hold_only_value_codes(config):
    torch.manual_seed(0)
    online, static = (build_mixer(name, config, 0) for name in ("vq", "vq_static_values"))
    assert list(online.codebooks) == ["keys"]
    assert list(static.codebooks) == ["keys", "values"]
    static.load_state_dict(online.state_dict(), strict=False)
    x = torch.randn(1, 20, 32)
    assert not torch.allclose(online(x)[0], static(x)[0])
    held = static(x)[1].memory.tail_values[0, :, 0]
    codes = static.value_codebook.codes[0]
    assert all((codes == value).all(-1).any() for value in held[: 3 + 20 % 3])


def test_evaluation_changes_and_records_nothing(layer):
    train(layer, torch.randn(2, 20, 32))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.eval()
    layer(torch.randn(2, 20, 32))
    assert layer.auxiliary_loss() is None
    assert all(codebook.recorded is None for codebook in layer.codebooks.values())
    for name, tensor in layer.state_dict().items():
        assert tensor.equal(before[name]), name


def test_training_moves_the_codebooks_alone(layer):
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    train(layer, torch.randn(2, 20, 32), 2)
    for name, tensor in layer.state_dict().items():
        assert tensor.equal(before[name]) == ("codebook" not in name), name


def test_auxiliary_loss_is_the_commitment_and_read_once(layer):
    """At the squared norm sqrt(8) that keys have in Transformer-VQ, summed over the two heads."""
    x = torch.randn(2, 20, 32)
    layer(x)
    loss = layer.auxiliary_loss()
    assert layer.auxiliary_loss() is None
    _, k, v = projections(layer, x)
    expected = torch.tensor(0.0)
    for y, codebook in zip((k, v), layer.codebooks.values(), strict=False):
        nearest = torch.cdist(y.transpose(1, 2), codebook.codes[None]).amin(-1)
        at_norm = 8**0.25 * nearest
        expected = expected + COMMITMENT_WEIGHT * at_norm.square().sum(1).mean()
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, [layer.k_proj.weight])
    assert gradient.any()


def test_training_reduces_the_quantization_error(layer):
    """Few hidden states make keys that a codebook can hold."""
    rows = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    x = rows[torch.randint(7, (2, 50), generator=torch.Generator().manual_seed(2))]
    untrained = codebook_health(layer)["keys"]
    assert untrained.quantization_error is None
    assert untrained.live_codes.tolist() == [0, 0]
    first = codebook_health(train(layer, x))["keys"]
    last = codebook_health(train(layer, x, 40))
    assert list(last) == list(layer.codebooks)
    for health in last.values():
        assert (health.quantization_error < 0.25 * first.quantization_error).all()
        assert (health.live_codes >= 6).all()
        assert (health.perplexity > 4).all()


def test_straight_through_changes_gradients_alone(config):
    """Those of queries and keys; the values', and the codebooks, stay."""
    x, found = torch.randn(2, 20, 32), []
    for config.straight_through in ("keys", "scores"):
        torch.manual_seed(0)
        layer = train(build_mixer("vq", config, 0), x, 2)
        o, _ = layer(x)
        weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.log_beta]
        grads = torch.autograd.grad((o * o.detach().cos()).sum(), weights)
        found.append((o, *grads, *layer.state_dict().values()))
    (o, q, k, *rest), (other_o, other_q, other_k, *other_rest) = found
    torch.testing.assert_close(o, other_o)
    assert not torch.allclose(q, other_q, rtol=0.1)
    assert not torch.allclose(k, other_k, rtol=0.1)
    for got, expected in zip(rest, other_rest, strict=True):
        torch.testing.assert_close(got, expected)


def test_beta_starts_at_eight(layer):
    torch.testing.assert_close(layer.beta, torch.full((4,), 8.0))


def test_bad_sizes_raise():
    sizes = {"num_codes": 4, "block_size": 2}
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        VQAttention(32, 4, 2, 8, **(sizes | {"block_size": 0}))
    with pytest.raises(ValueError, match=r"straight_through must be one of .*, got 'values'"):
        VQAttention(32, 4, 2, 8, **sizes, straight_through="values")
    with pytest.raises(ValueError, match="num_codes must be at least 1, got 0"):
        VQAttention(32, 4, 2, 8, **(sizes | {"num_codes": 0}))


def test_states_of_other_codes_or_blocks_raise(layer, config):
    x = torch.randn(1, 3, 32)
    options = {"quantize_values": layer.value_codebook is not None}
    for sizes, message in (
        ({"num_codes": 7, "block_size": 4}, "state must be of block_size 3, got one of 4"),
        ({"num_codes": 5, "block_size": 3}, r"value means \(2, 7, 8\) .*got \(2, 5, 8\)"),
    ):
        state = VQAttention(32, 4, 2, 8, **sizes, **options)(x)[1]
        with pytest.raises(ValueError, match=message):
            layer(x, state)


@pytest.mark.plain
def test_compiled_training_equals_eager(config):
    """With what a forward records, and the commitment loss."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x, found = torch.randn(2, 20, 32), []
    for compile_ in (True, False):
        torch.manual_seed(1)
        layer = build_mixer("vq", config, 0)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile_ else layer
        for _ in range(2):
            layer.begin_training_forward()
            o, _ = run(x)
            loss = o.square().sum() + layer.auxiliary_loss()
            layer.end_training_forward()
        grads = torch.autograd.grad(loss, list(layer.parameters()))
        found.append([o, *grads, *layer.state_dict().values()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
