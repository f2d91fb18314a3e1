"""Softmax attention against its definition, written with a full matrix of weights."""

import pytest
import torch

from ovq.ops.attention import KVState, softmax_attention


def by_definition(q, k, v, window_size, scale):
    """Every pair of tokens at once."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    logits = scale * torch.einsum("bihk,bjhk->bhij", q, k)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    seen = (j <= i) & (i - j < (window_size or q.shape[1] + 1))
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def inputs(num_tokens: int, num_kv_heads: int = 2):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((4, 6), (num_kv_heads, 6), (num_kv_heads, 3))
    return [
        torch.randn(2, num_tokens, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window_size", [None, 1, 2, 5, 8, 100])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 8, 9, 16, 23])
def test_equals_the_definition(num_tokens, window_size, num_kv_heads):
    q, k, v = inputs(num_tokens, num_kv_heads)
    o, state = softmax_attention(q, k, v, window_size=window_size, scale=0.7)
    torch.testing.assert_close(o, by_definition(q, k, v, window_size, 0.7), atol=1e-12, rtol=0)
    held = num_tokens if window_size is None else min(num_tokens, window_size - 1)
    assert state.keys.equal(k[:, num_tokens - held :])
    assert state.values.equal(v[:, num_tokens - held :])


@pytest.mark.parametrize("window_size", [None, 1, 4, 9])
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20, 30])
def test_carried_state_equals_one_call(window_size, cut):
    q, k, v = inputs(30)
    whole, last = softmax_attention(q, k, v, window_size=window_size)
    first, state = softmax_attention(q[:, :cut], k[:, :cut], v[:, :cut], window_size=window_size)
    second, state = softmax_attention(
        q[:, cut:], k[:, cut:], v[:, cut:], state, window_size=window_size
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-12, rtol=0)
    assert state.keys.equal(last.keys)
    assert state.num_tokens.equal(last.num_tokens)


def test_two_tokens_by_hand():
    """Logits 0 and log 3: weights 1/4 and 3/4."""
    q = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    k = (
        torch.tensor([0.0, 3.0])
        .log1p()
        .mul(torch.log(torch.tensor(3.0)) / torch.log(torch.tensor(4.0)))
    )
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    o, _ = softmax_attention(q, k.view(1, 2, 1, 1), v, scale=1.0)
    torch.testing.assert_close(o.flatten(), torch.tensor([4.0, 7.0]))
    o, _ = softmax_attention(q, k.view(1, 2, 1, 1), v, scale=1.0, window_size=1)
    torch.testing.assert_close(o.flatten(), torch.tensor([4.0, 8.0]))


def test_gradients_in_blocks_equal_the_definition():
    leaves = [x.requires_grad_() for x in inputs(23)]
    for_blocks = torch.autograd.grad(
        softmax_attention(*leaves, window_size=5, scale=0.7)[0].square().sum(), leaves
    )
    expected = torch.autograd.grad(by_definition(*leaves, 5, 0.7).square().sum(), leaves)
    for got, wanted in zip(for_blocks, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-11, rtol=0)


def test_windowed_state_keeps_no_larger_storage_alive():
    q, k, v = inputs(50)
    _, state = softmax_attention(q, k, v, window_size=4)
    assert state.keys.untyped_storage().nbytes() == state.keys.numel() * 8
    assert state.num_bytes == 2 * 3 * 2 * (6 + 3) * 8 + 2 * 8


def test_states_of_another_kind_raise():
    q, k, v = inputs(6)
    _, state = softmax_attention(q, k, v, window_size=4)
    with pytest.raises(ValueError, match="window_size 5, got one of 4"):
        softmax_attention(q, k, v, state, window_size=5)
    with pytest.raises(ValueError, match="window_size None, got one of 4"):
        softmax_attention(q, k, v, state)
    with pytest.raises(ValueError, match=r"got \{4, None\}|got \{None, 4\}"):
        KVState.concat([state, softmax_attention(q, k, v)[1]])
    with pytest.raises(ValueError, match="at least one state"):
        KVState.concat([])
    with pytest.raises(ValueError, match=r"keys of heads and dim \(1, 6\), got \(2, 6\)"):
        softmax_attention(q, k[:, :, :1], v[:, :, :1], state, window_size=4)


def test_bad_inputs_raise():
    q, k, v = inputs(6, num_kv_heads=2)
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        softmax_attention(q, k, v, window_size=0)
    with pytest.raises(ValueError, match="must divide the heads of q, got 2 and 3"):
        softmax_attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="share one dtype"):
        softmax_attention(q.float(), k, v)
