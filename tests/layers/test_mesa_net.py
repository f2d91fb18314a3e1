"""What MesaNet promises beyond the contract of all mixers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ovq.layers import MesaNet, build_mixer
from ovq.ops.mesa import naive_mesa


@pytest.fixture
def layer() -> MesaNet:
    torch.manual_seed(0)
    return MesaNet(32, num_heads=3, head_dim=4)


def test_the_layer_is_the_recurrence_between_projections(layer):
    """Each step written out in plain torch; queries and keys are convolved, values are not."""
    for parameter in (layer.o_norm.weight, layer.lambda_bias):
        nn.init.normal_(parameter)
    x = torch.randn(2, 11, 32)
    projected = torch.cat([layer.q_proj(x), layer.k_proj(x)], dim=-1)
    filters = layer.short_conv.weight.T[:, None]
    mixed = F.silu(F.conv1d(F.pad(projected.mT, (3, 0)), filters, groups=len(filters)).mT)
    q, k = (F.normalize(z.reshape(2, 11, 3, 4), dim=-1) for z in mixed.chunk(2, dim=-1))
    v, g = layer.v_proj(x).view(2, 11, 3, 4), layer.a_proj(x).sigmoid().log()
    lamb = 0.25 + F.softplus(layer.lambda_bias)
    o, _ = naive_mesa(q, k, v, g, layer.b_proj(x).sigmoid(), lamb)
    o = layer.o_norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x)[0], layer.o_proj(o.flatten(2)), atol=1e-4, rtol=1e-3)


def test_sizes_and_starting_values_by_hand(layer):
    torch.testing.assert_close(0.25 + F.softplus(layer.lambda_bias), torch.ones(3, 4))
    assert layer.o_norm.weight.eq(1).all()
    assert layer.state_size(0) == layer.state_size(10**6) == 4 * 3 * 4 * 8 + 4 * 3 * 24 + 8
    linear = [m for m in layer.children() if isinstance(m, nn.Linear)]
    assert sum(p.numel() for m in linear for p in m.parameters()) == 32 * 3 * (4 * 4 + 2) + 2 * 3


@pytest.mark.plain
def test_bad_sizes_and_states_raise(layer, config):
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        MesaNet(32, num_heads=3, head_dim=0)
    other = build_mixer("gated_delta_net", config, 0).init_state(1)
    with pytest.raises(ValueError, match=r"must hold memory \(1, 3, 4, 8\) here, got"):
        layer(torch.randn(1, 3, 32), other)
