"""The gated delta rule: what its memory holds, and that the chunk form is the recurrence."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ovq.ops.gated_delta_rule import gated_delta_rule, naive_gated_delta_rule

B, H, K, V = 2, 3, 5, 4
DECAYS = {"none": 0.0, "weak": 0.1, "strong": 5.0, "total": 1e4}


def inputs(num_tokens: int, decay: float = 0.1, dtype=torch.float64) -> list[Tensor]:
    """Queries, keys, values, log decays between 0 and ``-decay``, writing strengths, a memory."""
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    q, k = (F.normalize(normal(B, num_tokens, H, K), dim=-1) for _ in range(2))
    g, beta = -decay * normal(B, num_tokens, H).sigmoid(), normal(B, num_tokens, H).sigmoid()
    return [q, k, normal(B, num_tokens, H, V), g, beta, normal(B, H, K, V)]


def test_the_recurrence_by_hand():
    """Two tokens of one key each, decay 1/2, then read both."""
    k = torch.tensor([[1.0, 0.0], [0.6, 0.8]]).view(1, 2, 1, 2)
    v = torch.tensor([10.0, 5.0]).view(1, 2, 1, 1)
    g = torch.tensor([0.0, 0.5]).log().view(1, 2, 1).clamp(min=-100)
    beta = torch.tensor([1.0, 0.5]).view(1, 2, 1)
    o, h = naive_gated_delta_rule(k * 2**0.5, k, v, g, beta)
    # h = (10, 0); then (5, 0), of which the second key recalls 3, so u = 0.5 (5 - 3) = 1.
    torch.testing.assert_close(h.flatten(), torch.tensor([5.6, 0.8]))
    torch.testing.assert_close(o.flatten(), torch.tensor([10.0, 0.6 * 5.6 + 0.8 * 0.8]))


def test_a_full_write_replaces_what_its_key_held():
    """With no decay and full strength, orthonormal keys hold the value written last to each."""
    keys, values = torch.eye(4)[[0, 1, 2, 1, 0]], torch.randn(5, 3)
    k, v, one = keys.view(1, 5, 1, 4), values.view(1, 5, 1, 3), torch.ones(1, 5, 1)
    for rule in (naive_gated_delta_rule, gated_delta_rule):
        _, h = rule(k, k, v, 0 * one, one)
        torch.testing.assert_close(h[0, 0], torch.cat([values[[4, 3, 2]], torch.zeros(1, 3)]))


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 31])
def test_chunks_equal_the_recurrence(num_tokens, decay):
    """Output, memory and all gradients."""
    leaves = [x.requires_grad_() for x in inputs(num_tokens, decay)]
    found = []
    for rule, options in ((gated_delta_rule, {"chunk_size": 8}), (naive_gated_delta_rule, {})):
        o, h = rule(*leaves, **options)
        loss = (o * o.detach().cos()).sum() + (h * h.detach().sin()).sum()
        found.append([o, h, *torch.autograd.grad(loss, leaves)])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_the_chunk_size_changes_nothing(chunk_size):
    for ours, expected in zip(
        gated_delta_rule(*inputs(13), chunk_size=chunk_size),
        naive_gated_delta_rule(*inputs(13)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [8], [3, 3, 20], list(range(1, 29))])
def test_a_carried_memory_equals_one_call(cuts):
    *tokens, memory = inputs(29)
    kept = memory.clone()
    whole, last = gated_delta_rule(*tokens, memory, chunk_size=8)
    outputs, h = [], memory
    for start, stop in pairwise([0, *cuts, 29]):
        o, h = gated_delta_rule(*(x[:, start:stop] for x in tokens), h, chunk_size=8)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(h, last, atol=1e-12, rtol=1e-12)
    assert memory.equal(kept)


def test_float32_keeps_its_digits_beside_tokens_that_forget_all():
    """Sums of log decays are taken between tokens: what came before them costs no digits."""
    *tokens, memory = inputs(40, 0.1)
    tokens[3][:, ::3] = -3e4
    exact, exact_h = naive_gated_delta_rule(*tokens, memory)
    o, h = gated_delta_rule(*(x.float() for x in tokens), memory.float())
    torch.testing.assert_close(o, exact.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(h, exact_h.float(), atol=1e-6, rtol=1e-5)


def test_one_key_over_and_over_is_stable():
    """The triangular system is then at its worst: its inverse by powers would lose all digits."""
    q, _, v, g, beta, _ = inputs(64, 0.0, torch.float32)
    k = q[:, :1].expand_as(q)
    o, h = gated_delta_rule(k, k, v, g, torch.ones_like(beta))
    torch.testing.assert_close(o, v * K**-0.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((k[:, 0, :, None] @ h)[:, :, 0], v[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_dtypes_and_no_tokens(num_tokens):
    *tokens, memory = inputs(num_tokens, dtype=torch.bfloat16)
    tokens[3] = tokens[3].float()
    for rule in (gated_delta_rule, naive_gated_delta_rule):
        o, h = rule(*tokens, memory)
        assert (o.dtype, h.dtype) == (torch.bfloat16, torch.float32)
        assert o.shape == (B, num_tokens, H, V)
        if num_tokens == 0:
            assert h.equal(memory.float())


def test_autocast_changes_no_number():
    arguments = inputs(9, dtype=torch.float32)
    expected = gated_delta_rule(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_delta_rule(*arguments)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.equal(plain)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (B, 6, H), r"q must be a floating-point tensor of 4 axes, got .*\(2, 6, 3\)"),
        (1, (B, 6, H, K + 1), r"k must have the batch, tokens and head dim of q"),
        (1, (B, 6, 1, K), r"v must have the batch, tokens and heads of k"),
        (2, (B, 5, H, V), r"v must have the batch, tokens and heads of k"),
        (3, (B, 6, H, 1), r"g must be .* \[B, T, H\] = \(2, 6, 3\), got .*\(2, 6, 3, 1\)"),
        (4, (B, 6, H + 1), r"beta must be .* \[B, T, H\] = \(2, 6, 3\), got .*\(2, 6, 4\)"),
        (5, (B, H, V, K), r"state must be .* = \(2, 3, 5, 4\), got .*\(2, 3, 4, 5\)"),
        (5, (1, H, K, V), r"state must be .* = \(2, 3, 5, 4\), got .*\(1, 3, 5, 4\)"),
    ],
)
def test_shapes_that_do_not_fit_raise(index, shape, message):
    arguments = inputs(6)
    arguments[index] = torch.zeros(shape, dtype=torch.float64)
    for rule in (gated_delta_rule, naive_gated_delta_rule):
        with pytest.raises(ValueError, match=message):
            rule(*arguments)


@pytest.mark.plain
def test_grouped_keys_and_other_bad_arguments_raise():
    q, k, v, g, beta, h = inputs(6)
    with pytest.raises(ValueError, match=r"k must be .* = \(2, 6, 3, 5\), got .*\(2, 6, 1, 5\)"):
        gated_delta_rule(q, k[:, :, :1], v[:, :, :1], g, beta)
    with pytest.raises(ValueError, match="q, k, v must share one dtype"):
        gated_delta_rule(q, k.float(), v, g, beta)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        gated_delta_rule(q, k, v, g, beta, h, chunk_size=0)


@pytest.mark.plain
def test_compiled_equals_eager_at_any_length():
    """Output, memory and gradients; not compiled anew for every number of chunks."""
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend=counter)
    for num_tokens in (6, 9, 21, 40):
        leaves, found = [x.requires_grad_() for x in inputs(num_tokens)], []
        for form in (compiled, gated_delta_rule):
            o, h = form(*leaves, chunk_size=4)
            found.append([o, h, *torch.autograd.grad(o.sum() + h.sum(), leaves)])
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)
    assert 1 <= counter.frame_count <= 2
    torch.compiler.reset()
