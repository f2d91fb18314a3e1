"""State space duality: the recurrence by hand, and that the chunk form is the recurrence."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ovq.ops.gated_delta_rule import naive_gated_delta_rule
from ovq.ops.ssd import naive_ssd, ssd

BATCH, H, G, K, V = 2, 4, 2, 5, 3
RATES = {"none": 0.0, "weak": 0.1, "strong": 16.0, "total": 1e4}


def inputs(num_tokens: int, rate: float = 1.0, dtype=torch.float64, groups=G) -> list[Tensor]:
    """Inputs, steps between 0 and 1, rates of ``-rate`` and less, both maps, a state."""
    draw = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    x, dt = normal(BATCH, num_tokens, H, V), normal(BATCH, num_tokens, H).sigmoid()
    A = -rate * torch.arange(1, H + 1).to(dtype)
    maps = [normal(BATCH, num_tokens, groups, K) for _ in range(2)]
    return [x, dt, A, *maps, normal(BATCH, H, K, V)]


def test_the_recurrence_by_hand():
    """Two tokens, one channel, a state of two numbers; ``exp(dt A)`` is 1/4, then 1/2."""
    x = torch.tensor([3.0, 10.0]).view(1, 2, 1, 1)
    dt = torch.tensor([2.0, 1.0]).view(1, 2, 1)
    A = torch.tensor([0.5]).log()
    B = torch.tensor([[1.0, 0.0], [0.5, 2.0]]).view(1, 2, 1, 2)
    C = torch.tensor([[1.0, 1.0], [2.0, -1.0]]).view(1, 2, 1, 2)
    h = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
    y, h = naive_ssd(x, dt, A, B, C, h)
    # (4, 8) / 4 + 2 * 3 (1, 0) = (7, 2); (7, 2) / 2 + 10 (0.5, 2) = (8.5, 21).
    torch.testing.assert_close(h.flatten(), torch.tensor([8.5, 21.0]))
    torch.testing.assert_close(y.flatten(), torch.tensor([9.0, 17.0 - 21.0]))


def test_it_is_the_gated_rule_without_its_correction():
    """Where keys never meet, the delta rule corrects nothing, and both are linear attention."""
    k = torch.eye(K, dtype=torch.float64).view(1, K, 1, K).expand(1, K, H, K)
    x, dt, A, *_ = (z[:1, :K] if z.ndim > 1 else z for z in inputs(K, groups=H))
    q = torch.randn(1, K, H, K, dtype=torch.float64)
    y, _ = naive_ssd(x, dt, A, k, q)
    o, _ = naive_gated_delta_rule(q, k, dt[..., None] * x, dt * A, torch.ones_like(dt))
    torch.testing.assert_close(y, K**0.5 * o)


@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 31])
def test_chunks_equal_the_recurrence(num_tokens, rate):
    """Output, state and all gradients."""
    leaves = [z.requires_grad_() for z in inputs(num_tokens, rate)]
    found = []
    for form, options in ((ssd, {"chunk_size": 8}), (naive_ssd, {})):
        y, h = form(*leaves, **options)
        loss = (y * y.detach().cos()).sum() + (h * h.detach().sin()).sum()
        found.append([y, h, *torch.autograd.grad(loss, leaves)])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("groups", [1, H])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 64])
def test_chunk_size_and_groups(chunk_size, groups):
    arguments = inputs(13, groups=groups)
    expected = naive_ssd(*arguments)
    for ours, plain in zip(ssd(*arguments, chunk_size=chunk_size), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", [ssd, naive_ssd])
def test_heads_of_a_group_share_its_maps(form):
    x, dt, A, B, C, h = inputs(9)
    own = [z.repeat_interleave(H // G, dim=2) for z in (B, C)]
    for shared, plain in zip(form(x, dt, A, B, C, h), form(x, dt, A, *own, h), strict=True):
        torch.testing.assert_close(shared, plain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cuts", [[1], [8], [3, 3, 20], list(range(1, 29))])
def test_a_carried_state_equals_one_call(cuts):
    x, dt, A, B, C, state = inputs(29)
    kept = state.clone()
    whole, last = ssd(x, dt, A, B, C, state, chunk_size=8)
    outputs, h = [], state
    for start, stop in pairwise([0, *cuts, 29]):
        part = slice(start, stop)
        y, h = ssd(x[:, part], dt[:, part], A, B[:, part], C[:, part], h, chunk_size=8)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(h, last, atol=1e-12, rtol=1e-12)
    assert state.equal(kept)


def test_float32_keeps_its_digits_beside_tokens_that_forget_all():
    """Sums of log decays are taken between tokens: what came before them costs no digits."""
    arguments = inputs(40, 0.1)
    arguments[1][:, ::3] = 3e5
    exact, exact_h = naive_ssd(*arguments)
    y, h = ssd(*(z.float() for z in arguments))
    scale = exact.abs().max().item()
    torch.testing.assert_close(y, exact.float(), atol=1e-6 * scale, rtol=1e-5)
    torch.testing.assert_close(h, exact_h.float(), atol=1e-6 * scale, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_dtypes_and_no_tokens(num_tokens):
    x, dt, A, B, C, state = inputs(num_tokens, dtype=torch.bfloat16)
    for form in (ssd, naive_ssd):
        y, h = form(x, dt.float(), A.float(), B, C, state)
        assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
        assert y.shape == x.shape
        if num_tokens == 0:
            assert h.equal(state.float())


def test_autocast_changes_no_number():
    arguments = inputs(9, dtype=torch.float32)
    expected = ssd(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ssd(*arguments)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.equal(plain)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (BATCH, 6, H), r"x must be a floating-point tensor of 4 axes, got .*\(2, 6, 4\)"),
        (1, (BATCH, 6, 1), r"dt must be .* \[B, T, H\] = \(2, 6, 4\), got .*\(2, 6, 1\)"),
        (2, (H - 1,), r"A must be .* \[H\] = \(4,\), got .*\(3,\)"),
        (3, (BATCH, 6, 3, K), r"B must have .* groups that divide its heads, got \(2, 6, 3, 5\)"),
        (3, (BATCH, 5, G, K), r"B must have the batch and tokens of x"),
        (4, (BATCH, 6, G, K + 1), r"C must be .* = \(2, 6, 2, 5\), got .*\(2, 6, 2, 6\)"),
        (5, (BATCH, H, V, K), r"state must be .* = \(2, 4, 5, 3\), got .*\(2, 4, 3, 5\)"),
    ],
)
def test_shapes_that_do_not_fit_raise(index, shape, message):
    arguments = inputs(6)
    arguments[index] = torch.zeros(shape, dtype=torch.float64)
    for form in (ssd, naive_ssd):
        with pytest.raises(ValueError, match=message):
            form(*arguments)


@pytest.mark.plain
def test_other_bad_arguments_raise():
    x, dt, A, B, C, h = inputs(6)
    with pytest.raises(ValueError, match="x, B, C must share one dtype"):
        ssd(x, dt, A, B.float(), C)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ssd(x, dt, A, B, C, h, chunk_size=0)


@pytest.mark.plain
def test_compiled_equals_eager_at_any_length():
    """Output, memory and gradients; not compiled anew for every number of chunks."""
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()
    compiled = torch.compile(ssd, fullgraph=True, backend=counter)
    for num_tokens in (6, 9, 21, 40):
        leaves, found = [x.requires_grad_() for x in inputs(num_tokens)], []
        for form in (compiled, ssd):
            o, h = form(*leaves, chunk_size=4)
            found.append([o, h, *torch.autograd.grad(o.sum() + h.sum(), leaves)])
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)
    assert 1 <= counter.frame_count <= 2
    torch.compiler.reset()
