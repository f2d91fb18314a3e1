"""Linear attention: the chunks equal the recurrence, and the recurrence its definition."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ovq.ops.linear_attention import (
    LinearAttentionState,
    linear_attention,
    naive_linear_attention,
)

LENGTHS = (0, 1, 2, 3, 4, 5, 11, 29)
both = pytest.mark.parametrize("normalize", [False, True])


def inputs(num_tokens: int, seed: int = 0, num_rows: int = 2) -> list[Tensor]:
    """q of 4 heads, k and v of 2, with K = 5 and V = 3, in float64."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(4, 5), (2, 5), (2, 3)]
    return [
        torch.randn(num_rows, num_tokens, *s, generator=draw, dtype=torch.float64) for s in shapes
    ]


def state_after(num_tokens: int, normalize: bool) -> LinearAttentionState:
    return naive_linear_attention(*inputs(num_tokens, seed=7), normalize=normalize)[1]


@both
def test_by_hand(normalize):
    """Two tokens with K = V = 1: q = 2, 3; k = 1, 4; v = 5, 7."""
    q, k, v = (torch.tensor(x).view(1, 2, 1, 1) for x in ([2.0, 3.0], [1.0, 4.0], [5.0, 7.0]))
    expected = [2 * 5.0, 3 * (5.0 + 28.0)]
    if normalize:  # phi(k) = 2, 5
        expected = [5.0, (2 * 5.0 + 5 * 7.0) / (2 + 5)]
    for function in (linear_attention, naive_linear_attention):
        o, state = function(q, k, v, normalize=normalize)
        torch.testing.assert_close(o.flatten(), torch.tensor(expected))
        assert state.num_tokens.tolist() == [2]
    torch.testing.assert_close(
        state.sums.flatten(), torch.tensor([45.0, 7.0] if normalize else [33.0])
    )


@both
@pytest.mark.parametrize("carried", [False, True], ids=["from the start", "from a state"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_chunks_equal_the_recurrence(num_tokens, carried, normalize):
    """Outputs, state and the gradient of all inputs, with the gradient of the state taken too."""
    found = []
    for function, options in ((linear_attention, {"chunk_size": 4}), (naive_linear_attention, {})):
        leaves = [x.requires_grad_() for x in inputs(num_tokens)]
        state = state_after(6, normalize) if carried else None
        if state is not None:
            leaves.append(state.sums.requires_grad_())
        o, after = function(*leaves[:3], state, normalize=normalize, **options)
        loss = (o * o.detach().cos()).sum() + after.sums.square().sum() + 0 * leaves[0].sum()
        found.append((o, after.sums, *torch.autograd.grad(loss, leaves, materialize_grads=True)))
        assert after.num_tokens.tolist() == [num_tokens + 6 * carried] * 2
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    assert num_tokens == 0 or all(x.any() for x in found[1])


@both
def test_equals_the_masked_product_of_all_pairs(normalize):
    q, k, v = inputs(11)
    features = (torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1)
    mapped_q, mapped_k = features if normalize else (q * 5**-0.5, k)
    mapped_k, values = (x.repeat_interleave(2, dim=2) for x in (mapped_k, v))
    weights = torch.einsum("bihk,bjhk->bhij", mapped_q, mapped_k).tril()
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    expected = torch.einsum("bhij,bjhv->bihv", weights, values)
    o, _ = linear_attention(q, k, v, normalize=normalize, chunk_size=3)
    torch.testing.assert_close(o, expected, atol=1e-12, rtol=1e-12)


@both
@pytest.mark.parametrize("cuts", [[1], [4, 8], [3, 3, 10], list(range(1, 13))])
def test_any_split_equals_one_call(cuts, normalize):
    q, k, v = inputs(13)
    whole, whole_state = linear_attention(q, k, v, normalize=normalize, chunk_size=4)
    state, outputs = None, []
    for start, stop in pairwise([0, *cuts, 13]):
        part = (x[:, start:stop] for x in (q, k, v))
        o, state = linear_attention(*part, state, normalize=normalize, chunk_size=4)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state.sums, whole_state.sums, atol=1e-12, rtol=1e-12)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_in_float32_and_output_in_the_inputs_dtype(dtype, normalize):
    q, k, v = inputs(200)
    exact, _ = linear_attention(q, k, v, normalize=normalize)
    o, state = linear_attention(*(x.to(dtype) for x in (q, k, v)), normalize=normalize)
    assert o.dtype == dtype
    assert state.sums.dtype == torch.float32
    loss = torch.finfo(dtype).eps * exact.abs().max()
    torch.testing.assert_close(o.double(), exact, atol=4 * loss.item(), rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, under = linear_attention(*(x.to(dtype) for x in (q, k, v)), normalize=normalize)
    assert under.sums.equal(state.sums)


def test_keys_that_no_feature_sees_give_finite_outputs_and_gradients():
    """``phi`` underflows to zero far below zero, and so would the normaliser."""
    q, k, v = (x.float() for x in inputs(5))
    leaf = (q - 200).requires_grad_()
    o, _ = linear_attention(leaf, k - 200, v, normalize=True)
    o.sum().backward()
    assert o.isfinite().all()
    assert leaf.grad.isfinite().all()


@both
def test_incoming_state_is_untouched(normalize):
    state = state_after(6, normalize)
    sums = state.sums.clone()
    after = linear_attention(*inputs(5), state, normalize=normalize)[1]
    assert state.sums.equal(sums)
    assert state.num_tokens.tolist() == [6, 6]
    assert not after.sums.equal(sums)


@both
def test_rows_of_states(normalize):
    states = [state_after(n, normalize) for n in (3, 5)]
    joined = LinearAttentionState.concat(states)
    assert joined.num_tokens.tolist() == [3, 3, 5, 5]
    picked = joined.select_rows(torch.tensor([3, 0, 0]))
    assert picked.num_tokens.tolist() == [5, 3, 3]
    assert picked.sums.equal(joined.sums[[3, 0, 0]])
    assert picked.num_bytes == 3 * (2 * 5 * (3 + normalize) * 8 + 8)
    assert picked.to("meta").num_bytes == picked.num_bytes
    with pytest.raises(ValueError, match="states must share one shape"):
        LinearAttentionState.concat([states[0], state_after(3, not normalize)])
    with pytest.raises(ValueError, match="states must share one shape"):
        LinearAttentionState.concat([])


@pytest.mark.plain
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "q must be a floating-point tensor of 4 axes"),
        (lambda q, k, v: (q, k.long(), v), "k must be a floating-point tensor of 4 axes"),
        (lambda q, k, v: (q, k, v.float()), "q, k, v must share one dtype"),
        (lambda q, k, v: (q, k[:, :4], v[:, :4]), "k must have the batch, tokens and head dim"),
        (lambda q, k, v: (q, k, v[:, :, :1]), "v must have the batch, tokens and heads of k"),
        (lambda q, k, v: (q[:, :, :3], k, v), "heads of k must divide .* got 2 and 3"),
    ],
)
def test_inputs_that_do_not_fit_raise(change, message):
    with pytest.raises(ValueError, match=message):
        linear_attention(*change(*inputs(5)))


@pytest.mark.plain
def test_states_and_options_that_do_not_fit_raise():
    q, k, v = inputs(5)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        linear_attention(q, k, v, chunk_size=0)
    with pytest.raises(ValueError, match="state must have one row a sequence, 1 here, got 2"):
        linear_attention(q[:1], k[:1], v[:1], state_after(3, False))
    with pytest.raises(ValueError, match=r"\(2, 5, 4\) .*normalize=True, got \(2, 5, 3\)"):
        linear_attention(q, k, v, state_after(3, False), normalize=True)


@pytest.mark.plain
@both
def test_compiled_equals_eager_at_any_length(normalize):
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, backend=counter)
    state = state_after(6, normalize)
    for num_tokens in (5, 6, 8, 9, 13):
        q, k, v = inputs(num_tokens)
        found = compiled(q, k, v, state, normalize=normalize, chunk_size=4)
        expected = linear_attention(q, k, v, state, normalize=normalize, chunk_size=4)
        torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(found[1].sums, expected[1].sums, atol=1e-12, rtol=1e-12)
    assert 1 <= counter.frame_count <= 3
