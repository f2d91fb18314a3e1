"""The mesa recurrence: it is ridge regression, and the chunk form is the recurrence."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ovq.ops.mesa import mesa, naive_mesa

B, H, K, V = 2, 3, 5, 4
DECAYS = {"none": 0.0, "weak": 0.1, "strong": 5.0, "total": 1e4}


def inputs(num_tokens: int, decay: float = 0.1, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys, values, log decays, weights, regularisation, and the sums of 7 tokens."""
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    q, k = (F.normalize(normal(B, num_tokens, H, K), dim=-1) for _ in range(2))
    g, beta = -decay * normal(B, num_tokens, H).sigmoid(), normal(B, num_tokens, H).sigmoid()
    past = normal(B, H, 7, K)
    state = past.mT @ torch.cat([past, normal(B, H, 7, V)], dim=-1)
    return [q, k, normal(B, num_tokens, H, V), g, beta, normal(H, K).exp(), state]


@pytest.mark.parametrize("form", [mesa, naive_mesa])
@pytest.mark.parametrize("t", [0, 3, 18])
def test_an_output_is_the_ridge_regression_of_all_values_on_their_keys(form, t):
    """By least squares on the weighted tokens and one further row for each regularised number."""
    q, k, v, g, beta, lamb, _ = inputs(19)
    o, _ = form(q, k, v, g, beta, lamb)
    for row, head in ((0, 0), (1, 2)):
        own = (row, slice(t + 1), head)
        since = g[own].sum() - g[own].cumsum(0)
        root = (beta[own] * since.exp()).sqrt()[:, None]
        rows = torch.cat([root * k[own], lamb[head].sqrt().diag()])
        targets = torch.cat([root * v[own], torch.zeros(K, V).double()])
        best = torch.linalg.lstsq(rows, targets).solution
        torch.testing.assert_close(o[row, t, head], q[row, t, head] @ best)


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 31])
def test_chunks_equal_the_recurrence(num_tokens, decay):
    """Output, sums and all gradients."""
    leaves = [x.requires_grad_() for x in inputs(num_tokens, decay)]
    found = []
    for form, options in ((mesa, {"chunk_size": 8}), (naive_mesa, {})):
        o, h = form(*leaves, **options)
        loss = (o * o.detach().cos()).sum() + (h * h.detach().sin()).sum()
        found.append([o, h, *torch.autograd.grad(loss, leaves)])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [8], [3, 3, 20], list(range(1, 29))])
def test_carried_sums_equal_one_call(cuts):
    *tokens, lamb, state = inputs(29)
    kept = state.clone()
    whole, last = mesa(*tokens, lamb, state, chunk_size=8)
    outputs, h = [], state
    for start, stop in pairwise([0, *cuts, 29]):
        o, h = mesa(*(x[:, start:stop] for x in tokens), lamb, h, chunk_size=8)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(h, last, atol=1e-12, rtol=1e-12)
    assert state.equal(kept)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_dtypes_and_no_tokens(num_tokens):
    for form in (mesa, naive_mesa):
        o, h = form(*inputs(num_tokens, dtype=torch.bfloat16))
        assert (o.dtype, h.dtype) == (torch.bfloat16, torch.float32)
        assert o.shape == (B, num_tokens, H, V)


def test_autocast_changes_no_number():
    arguments = inputs(9, dtype=torch.float32)
    expected = mesa(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mesa(*arguments)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.equal(plain)


def test_gradients_hold_the_matrices_of_one_chunk_at_a_time():
    """What autograd keeps for the backward grows by less than one ``[K, K]`` for each token."""
    sizes = {}
    for num_tokens in (64, 128):
        leaves = [x.requires_grad_() for x in inputs(num_tokens)]
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            o, _ = mesa(*leaves, chunk_size=8)
        sizes[num_tokens] = sum(kept.values())
        o.sum().backward()
    per_token = (sizes[128] - sizes[64]) / (64 * B * H * 8)
    assert per_token < 3 * (2 * K + V) + 2 * 8  # K^2 = 25 of each kind would be beyond this


@pytest.mark.plain
@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (B, 6, H), r"q must be a floating-point tensor of 4 axes, got .*\(2, 6, 3\)"),
        (1, (B, 6, H, K + 1), "k must have the batch, tokens and head dim of q"),
        (3, (B, 5, H), r"g must be .* \[B, T, H\] = \(2, 6, 3\), got .*\(2, 5, 3\)"),
        (5, (H, K + 1), r"lamb must be .* \[H, K\] = \(3, 5\), got .*\(3, 6\)"),
        (6, (B, H, K, V), r"state must be .* = \(2, 3, 5, 9\), got .*\(2, 3, 5, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_raise(index, shape, message):
    arguments = inputs(6)
    arguments[index] = torch.zeros(shape, dtype=torch.float64)
    for form in (mesa, naive_mesa):
        with pytest.raises(ValueError, match=message):
            form(*arguments)


@pytest.mark.plain
def test_other_bad_arguments_raise():
    q, k, v, g, beta, lamb, h = inputs(6)
    with pytest.raises(ValueError, match=r"k must be .* = \(2, 6, 3, 5\), got .*\(2, 6, 1, 5\)"):
        mesa(q, k[:, :, :1], v[:, :, :1], g, beta, lamb)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        mesa(q, k, v, g, beta, lamb, h, chunk_size=0)
