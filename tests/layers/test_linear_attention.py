"""What the linear attention layers promise beyond the contract."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ovq.layers import build_mixer
from ovq.ops.linear_attention import linear_attention

NAMES = ("linear_attention", "linear_attention_normalized")


def test_the_layer_is_the_operator_between_projections_and_a_norm(config):
    layer = build_mixer("linear_attention", config, 0)
    with torch.no_grad():
        layer.norm_weight.copy_(torch.randn(8))
    x = torch.randn(2, 11, 32)
    q, k, v = (p(x).view(2, 11, -1, 8) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    o, _ = linear_attention(q, k, v)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm_weight
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


def test_the_normalized_layer_is_the_operator_between_projections(config):
    layer = build_mixer("linear_attention_normalized", config, 0)
    x = torch.randn(2, 11, 32)
    q, k, v = (p(x).view(2, 11, -1, 8) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    o, _ = linear_attention(q, k, v, normalize=True)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))
    assert "norm_weight" not in dict(layer.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_in_range_however_long_the_sequence(config, name):
    """A sum over tokens does not, without a norm or a normaliser."""
    layer = build_mixer(name, config, 0)
    x = torch.ones(1, 4000, 32)
    o = layer(x)[0][0]
    assert o[0].abs().sum() > 0.1
    torch.testing.assert_close(o[-1], o[20], atol=1e-3, rtol=0.01)


def test_short_convolution_follows_the_projections(config):
    layer = build_mixer("linear_attention", replace(config, use_short_conv=True), 0)
    x = torch.randn(1, 9, 32)
    projected = torch.cat([p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
    mixed, _ = layer.short_conv(projected, layer.short_conv.init_state(1))
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in mixed.split([32, 16, 16], dim=-1))
    o, _ = linear_attention(q, k, v)
    o = F.rms_norm(o, (8,), eps=1e-5)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)))


def test_state_size_by_hand(config):
    """2 kv heads of 8 x 8 numbers, with the normaliser 8 x 9; 3 inputs of 64 channels."""
    plain, normalized = (build_mixer(name, config, 0) for name in NAMES)
    convolved = build_mixer(NAMES[0], replace(config, use_short_conv=True), 0)
    assert plain.state_size(5) == 2 * 8 * 8 * 4 + 8
    assert normalized.state_size(5) == 2 * 8 * 9 * 4 + 8
    assert convolved.state_size(5) == plain.state_size(5) + 3 * 64 * 4


@pytest.mark.plain
def test_states_of_other_mixers_raise(config):
    x = torch.randn(1, 3, 32)
    plain, normalized = (build_mixer(name, config, 0) for name in NAMES)
    vq = build_mixer("vq", config, 0)
    convolved = build_mixer(NAMES[0], replace(config, use_short_conv=True), 0)
    for state, message in (
        (vq(x)[1], "state must hold a memory of class LinearAttentionState, got VQState"),
        (normalized(x)[1], r"state must hold sums \(2, 8, 8\).* got \(2, 8, 9\)"),
        (convolved(x)[1], r"convolution inputs \(1, 0, 0\).* got \(1, 3, 64\)"),
        (build_mixer("ovq", config, 0)(x)[1], "of class LinearAttentionState, got OVQState"),
        (build_mixer("full_attention", config, 0)(x)[1], "state must be of class ConvolvedState"),
    ):
        with pytest.raises(ValueError, match=message):
            plain(x, state)
