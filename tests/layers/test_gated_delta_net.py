"""What Gated DeltaNet promises beyond the contract of all mixers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovq.layers import GatedDeltaNet, build_mixer
from ovq.ops.gated_delta_rule import naive_gated_delta_rule


@pytest.fixture
def layer() -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(32, num_heads=3, head_dim=4, value_head_dim=6)


def test_the_layer_is_the_rule_between_projections(layer):
    """Each step written out in plain torch, with the rule one token at a time."""
    nn.init.normal_(layer.o_norm.weight)
    x = torch.randn(2, 11, 32)
    projected = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], dim=-1)
    filters = layer.short_conv.weight.T[:, None]
    mixed = F.conv1d(F.pad(projected.mT, (3, 0)), filters, groups=len(filters)).mT
    q, k, v = F.silu(mixed).split([12, 12, 18], dim=-1)
    q, k = (F.normalize(z.view(2, 11, 3, 4), dim=-1) for z in (q, k))
    g = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    beta = torch.sigmoid(layer.b_proj(x))
    o, _ = naive_gated_delta_rule(q, k, v.view(2, 11, 3, 6), g, beta)
    o = layer.o_norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    o = layer.o_proj((o * F.silu(layer.g_proj(x).view(2, 11, 3, 6))).flatten(2))
    torch.testing.assert_close(layer(x)[0], o, atol=1e-4, rtol=1e-3)  # 1e-6 in its unit norms


def test_rates_and_steps_start_in_their_ranges():
    torch.manual_seed(0)
    layer = GatedDeltaNet(8, num_heads=4000, head_dim=1)
    rates, steps = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 0 < rates.min() < 0.1
    assert 15.9 < rates.max() <= 16.001
    assert abs(rates.mean() - 8) < 0.3
    assert 0.99e-3 < steps.min() < 1.1e-3
    assert 0.985e-1 < steps.max() < 1.01e-1
    assert abs(steps.log10().mean() + 2) < 0.05
    assert layer.o_norm.weight.eq(1).all()


def test_state_size_by_hand(layer):
    """The memory, three inputs of each channel of the convolution, and a count."""
    expected = 4 * 3 * 4 * 6 + 4 * 3 * (12 + 12 + 18) + 8
    assert layer.state_size(0) == layer.state_size(10**6) == expected
    assert layer.to(torch.bfloat16).state_size(1) == expected - 2 * 3 * 42


def test_number_of_parameters(layer):
    D, H, K, V = 32, 3, 4, 6
    projections = sum(p.numel() for m in layer.children() for p in m.parameters() if p.ndim == 2)
    assert projections == D * H * (2 * K + 3 * V + 2) + layer.short_conv.weight.numel()


def test_fields_of_the_configuration(config):
    wide = build_mixer("gated_delta_net", replace(config, expand_v=1.5), layer_idx=0)
    assert (wide.num_heads, wide.head_dim, wide.value_head_dim) == (4, 8, 12)
    assert wide(torch.randn(1, 3, 32))[0].shape == (1, 3, 32)
    with pytest.raises(ValueError, match="expand_v must make a whole number of head_dim 8, got"):
        build_mixer("gated_delta_net", replace(config, expand_v=1.3), layer_idx=0)
    with pytest.raises(ValueError, match="value_head_dim must be at least 1, got 0"):
        build_mixer("gated_delta_net", replace(config, expand_v=0.0), layer_idx=0)


@pytest.mark.plain
def test_states_and_inputs_that_do_not_fit_raise(layer, config):
    x = torch.randn(1, 3, 32)
    for message, state in {
        r"must be of class RecurrentState, got KVState": build_mixer("full_attention", config, 0),
        r"must hold memory \(1, 3, 4, 6\) here, got \(1, 8, 6, 8\)": build_mixer(
            "mamba2", config, 0
        ),
        r"must hold memory .* got \(1, 3, 6, 4\)": GatedDeltaNet(32, 3, 6, value_head_dim=4),
    }.items():
        with pytest.raises(ValueError, match=message):
            layer(x, state.init_state(1))
    with pytest.raises(ValueError, match=r"must be \[B, T, 32\], got \(1, 3, 31\)"):
        layer(x[..., 1:])
