"""Attention to a window and the first tokens: equal to dense attention with the rest masked."""

import pytest
import torch

from ovq.ops.attention import softmax_attention
from ovq.ops.rotary import rotate
from ovq.ops.sink_attention import BLOCK, SinkState, sink_attention

THETA = 50.0


def inputs(num_rows: int, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(num_rows, num_tokens, h, d, generator=generator, dtype=torch.float64)
        for h, d in ((4, 6), (2, 6), (2, 3))
    )


def empty(num_rows: int, window_size: int, num_first_tokens: int) -> SinkState:
    return SinkState.empty(
        num_rows, 2, 6, 3,
        window_size=window_size, num_first_tokens=num_first_tokens, dtype=torch.float64,
    )  # fmt: skip


def run(q, k, v, state, max_position=10**6):
    return sink_attention(q, k, v, 0.7, state, rope_theta=THETA, max_position=max_position)


def by_tokens(q, k, v, window_size, num_first_tokens, max_position):
    """Every query by itself: distances to first tokens end, those in the window do not."""
    outputs = []
    for i in range(q.shape[1]):
        first = list(range(min(num_first_tokens, i + 1)))
        rest = list(range(max(num_first_tokens, i - window_size + 1), i + 1))
        apart = [min(i, max_position) - j for j in first] + [i - j for j in rest]
        groups = q[:, i].unflatten(1, (2, -1))[:, :, :, None].expand(-1, -1, -1, len(apart), -1)
        turned = rotate(groups, torch.tensor(apart), THETA)
        kept = k[:, first + rest].transpose(1, 2)[:, :, None]
        logits = 0.7 * (turned * kept).sum(-1)
        values = v[:, first + rest].transpose(1, 2)
        outputs.append((logits.softmax(-1) @ values).flatten(1, 2))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("max_position", [7, 10**6])
@pytest.mark.parametrize(("window_size", "num_first_tokens"), [(1, 0), (4, 3), (5, 1), (40, 2)])
def test_equals_every_query_by_itself(window_size, num_first_tokens, max_position):
    q, k, v = inputs(2, 23)
    o, state = run(q, k, v, empty(2, window_size, num_first_tokens), max_position)
    expected = by_tokens(q, k, v, window_size, num_first_tokens, max_position)
    torch.testing.assert_close(o, expected, atol=1e-12, rtol=0)
    assert state.memory.keys.shape[1] == min(23 - num_first_tokens, window_size - 1)


def test_is_full_attention_until_a_token_leaves():
    q, k, v = inputs(1, 30)
    places = torch.arange(30)[:, None]
    full, _ = softmax_attention(rotate(q, places, THETA), rotate(k, places, THETA), v, scale=0.7)
    o, _ = run(q, k, v, empty(1, 8, 3))
    torch.testing.assert_close(o[:, :11], full[:, :11], atol=1e-12, rtol=0)
    assert (o - full)[:, 11:].abs().amin(dim=(0, 2, 3)).min() > 1e-6


@pytest.mark.parametrize("cuts", [[1], [2, 5, 6], [BLOCK - 1], list(range(1, 40))])
def test_any_split_equals_one_call(cuts):
    """Also beyond the queries that are read at once."""
    q, k, v = inputs(1, BLOCK + 20)
    whole, after = run(q, k, v, empty(1, 9, 4))
    state, outputs = empty(1, 9, 4), []
    for start, stop in zip([0, *cuts], [*cuts, BLOCK + 20], strict=True):
        o, state = run(*(x[:, start:stop] for x in (q, k, v)), state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(state.memory.keys, after.memory.keys, atol=1e-12, rtol=0)
    assert state.num_tokens.tolist() == [BLOCK + 20]


@pytest.mark.parametrize("num_first_tokens", [0, 2])
def test_gradients_match_finite_differences(num_first_tokens):
    q, k, v = (x.requires_grad_() for x in inputs(1, 7))

    def outputs(*leaves):
        return run(*leaves, empty(1, 3, num_first_tokens))[0]

    assert torch.autograd.gradcheck(outputs, (q, k, v), fast_mode=True)
