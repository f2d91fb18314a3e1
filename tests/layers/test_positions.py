"""Rotary embeddings: hand-computed angles, distance only, Hugging Face's layout."""

import math

import pytest
import torch

from ovq.layers.full_attention import FullAttention
from ovq.layers.positions import token_positions
from ovq.ops.rotary import rotate


def test_quarter_turn_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    # theta = 16: angles position * (1, 1/4); the pairs are (1, 3) and (2, 4).
    turned = rotate(x, torch.tensor([[2]]), 16.0).flatten()
    c, s = (math.cos(2.0), math.cos(0.5)), (math.sin(2.0), math.sin(0.5))
    expected = [c[0] - 3 * s[0], 2 * c[1] - 4 * s[1], 3 * c[0] + s[0], 4 * c[1] + 2 * s[1]]
    torch.testing.assert_close(turned, torch.tensor(expected))


def test_products_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).double()
    products = [
        (rotate(q, torch.tensor([[n + 5]]), 1e4) * rotate(k, torch.tensor([[n]]), 1e4)).sum()
        for n in (0, 1, 1000, 2_000_000)
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4), atol=1e-8, rtol=0)


def test_layout_is_hugging_faces():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, positions = torch.randn(2, 7, 3, 8), torch.arange(7)[None]
    angles = positions[..., None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    angles = torch.cat([angles, angles], dim=-1)
    theirs, _ = llama.apply_rotary_pos_emb(x, x, angles.cos(), angles.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, positions[..., None], 10000.0), theirs)


def test_positions_go_on_from_each_rows_tokens():
    assert token_positions(None, 3, torch.device("cpu")).tolist() == [[0, 1, 2]]
    layer = FullAttention(8, 2, 2, 4, rope_theta=1e4)
    pasts = [layer(torch.randn(1, n, 8))[1] for n in (2, 5)]
    state = type(pasts[0]).concat(pasts)
    assert token_positions(state, 2, torch.device("cpu")).tolist() == [[2, 3], [5, 6]]


def test_an_odd_head_raises():
    with pytest.raises(ValueError, match=r"head_dim must be even .* got 3"):
        rotate(torch.ones(1, 1, 1, 3), torch.tensor([[0]]), 1e4)
    with pytest.raises(ValueError, match=r"head_dim must be even .* got 3"):
        FullAttention(8, 2, 2, 3, rope_theta=1e4)
    FullAttention(8, 2, 2, 3, rope_theta=None)
