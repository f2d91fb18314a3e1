"""What Mamba-2 promises beyond the contract of all mixers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovq.layers import Mamba2, build_mixer
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.ssd import naive_ssd


@pytest.fixture
def layer() -> Mamba2:
    torch.manual_seed(0)
    return Mamba2(32, num_heads=4, head_dim=6, ssm_state_size=5, num_groups=2)


def test_the_layer_is_the_state_space_between_projections(layer):
    """Each step written out in plain torch, with the state space one token at a time."""
    for parameter in (layer.norm.weight, layer.D):
        nn.init.normal_(parameter)
    u = torch.randn(2, 11, 32)
    z, mixed, dt = layer.in_proj(u).split([24, 24 + 10 + 10, 4], dim=-1)
    filters, bias = layer.short_conv.weight.T[:, None], layer.short_conv.bias
    mixed = F.conv1d(F.pad(mixed.mT, (3, 0)), filters, bias, groups=len(filters)).mT
    x, B, C = F.silu(mixed).split([24, 10, 10], dim=-1)
    x, dt = x.view(2, 11, 4, 6), F.softplus(dt + layer.dt_bias)
    B, C = B.view(2, 11, 2, 5), C.view(2, 11, 2, 5)
    y, _ = naive_ssd(x, dt, -layer.A_log.exp(), B, C)
    y = (y + layer.D[:, None] * x).flatten(2) * F.silu(z)
    groups = y.view(2, 11, 2, 12)
    y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2)
    torch.testing.assert_close(
        layer(u)[0], layer.out_proj(layer.norm.weight * y), atol=1e-5, rtol=1e-4
    )


def test_rates_and_steps_start_in_their_ranges():
    torch.manual_seed(0)
    layer = Mamba2(8, num_heads=4000, head_dim=1, ssm_state_size=1)
    rates, steps = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 < rates.min() < 1.1
    assert 15.9 < rates.max() <= 16.001
    assert abs(rates.mean() - 8.5) < 0.3
    assert 0.99e-3 < steps.min() < 1.1e-3
    assert 0.985e-1 < steps.max() < 1.01e-1
    assert abs(steps.log10().mean() + 2) < 0.05
    assert layer.D.eq(1).all()
    assert layer.norm.weight.eq(1).all()


def test_state_size_by_hand(layer):
    """The state, three inputs of each channel of the convolution, and a count."""
    expected = 4 * 4 * 5 * 6 + 4 * 3 * (24 + 10 + 10) + 8
    assert layer.state_size(0) == layer.state_size(10**6) == expected
    assert layer.to(torch.bfloat16).state_size(1) == expected - 2 * 3 * 44


def test_number_of_parameters(layer):
    D, H, V, K, G = 32, 4, 6, 5, 2
    projections = layer.in_proj.weight.numel() + layer.out_proj.weight.numel()
    assert projections == D * (3 * H * V + 2 * G * K + H)


def test_short_convolution_with_bias_starts_as_torchs():
    """Weights and bias uniform within ``width^-1/2``, as ``nn.Conv1d`` of one input channel."""
    torch.manual_seed(0)
    convolution = ShortConvolution(3000, bias=True)
    for parameter in convolution.parameters():
        assert 0.49 < parameter.abs().max() <= 0.5
        assert abs(parameter.mean()) < 0.02


def test_fields_of_the_configuration(config):
    """Heads follow from the width, whatever the number of attention heads."""
    changed = replace(config, ssm_expand=1.5, ssm_state_size=7, num_attention_heads=2)
    mixer = build_mixer("mamba2", changed, layer_idx=0)
    assert (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size) == (6, 8, 7)
    with pytest.raises(ValueError, match="ssm_expand must make of hidden_size 32 a multiple of"):
        build_mixer("mamba2", replace(config, ssm_expand=1.1), layer_idx=0)
    with pytest.raises(ValueError, match="ssm_state_size must be at least 1, got 0"):
        build_mixer("mamba2", replace(config, ssm_state_size=0), layer_idx=0)
    with pytest.raises(ValueError, match="num_groups must divide num_heads 4, got 3"):
        Mamba2(32, num_heads=4, head_dim=6, ssm_state_size=5, num_groups=3)


@pytest.mark.plain
def test_states_and_inputs_that_do_not_fit_raise(layer, config):
    u = torch.randn(1, 3, 32)
    other_convolution = replace(layer.init_state(1), conv_inputs=torch.zeros(1, 3, 43))
    for message, state in {
        "must be of class RecurrentState, got KVState": build_mixer(
            "full_attention", config, 0
        ).init_state(1),
        r"must hold memory \(1, 4, 5, 6\) here, got \(1, 4, 8, 8\)": build_mixer(
            "gated_delta_net", config, 0
        ).init_state(1),
        r"must hold conv_inputs \(1, 3, 44\) here, got \(1, 3, 43\)": other_convolution,
    }.items():
        with pytest.raises(ValueError, match=message):
            layer(u, state)
    with pytest.raises(ValueError, match=r"must be \[B, T, 32\], got \(1, 3, 31\)"):
        layer(u[..., 1:])
