"""VQ attention is dense attention to quantized keys; its blocks equal its recurrence."""

from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ovq.ops.quantization import nearest_codes, quantized
from ovq.ops.vq_attention import STRAIGHT_THROUGH, naive_vq_attention, vq_attention
from ovq.ops.vq_state import VQState

C, S = 3, 7
LENGTHS = (0, 1, 2, 3, 4, 6, 7, 19)
REAL = ("value_means", "tail_keys", "tail_values")
WHOLE = ("counts", "tail_assigned", "num_tokens")


def inputs(num_tokens: int, seed: int = 0, num_rows: int = 2) -> list[Tensor]:
    """q of 4 heads, k and v of 2, beta, and codes: K = 5, V = 6, in float64."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (F.normalize(normal(num_rows, num_tokens, heads, 5), dim=-1) for heads in (4, 2))
    v, beta = normal(num_rows, num_tokens, 2, 6), 2 + normal(4).exp()
    codes = torch.randn(2, S, 5, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return [q, k, v, beta, 0.6 * codes]


def in_blocks(*inputs, **options):
    """The same function as of a sequence that is not short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ovq.ops.vq_attention.SHORT", -1)
        return vq_attention(*inputs, **options)


def state_after(*lengths: int, block_size: int = C) -> VQState:
    """One row after each number of tokens."""
    states = [
        naive_vq_attention(*inputs(n, seed=n, num_rows=1), block_size=block_size)[1]
        for n in lengths
    ]
    return VQState.concat(states)


def dense(q, k, v, beta, codes, block_size: int, straight_through: str) -> Tensor:
    """Softmax attention to all quantized keys, with gradients of the keys that queries meet.

    By "keys" these are the quantized ones, of older blocks without a gradient; by "scores" the keys
    themselves, and for an older one the mean of all older ones that share its code.
    """
    T, assigned = q.shape[1], nearest_codes(k, codes)
    k_hat, block = quantized(k, codes, assigned), torch.arange(T) // block_size
    older = block[:, None] - block > 1
    if straight_through == "keys":
        met = torch.where(older[..., None, None], k_hat.detach()[:, None], k_hat[:, None])
    else:
        shares = (assigned[:, None, :, None] == assigned[:, None, None]) & older[:, None, :, None]
        shares = shares.to(k) / shares.sum(3, keepdim=True).clamp_min(1)  # [B, i, j, l, G]
        means = torch.einsum("bijlg,blgk->bijgk", shares, k)
        met = torch.where(older[..., None, None], means, k[:, None])
    through = torch.einsum("bihk,bijhk->bhij", q, met.repeat_interleave(2, dim=3))
    scores = torch.einsum("bihk,bjhk->bhij", q, k_hat.repeat_interleave(2, dim=2))
    logits = beta[:, None, None] * (through + (scores - through).detach())
    weights = logits.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v.repeat_interleave(2, dim=2))


def gradients(o: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((o * o.detach().cos()).sum(), leaves)


@pytest.mark.parametrize("straight_through", STRAIGHT_THROUGH)
@pytest.mark.parametrize("function", [vq_attention, in_blocks, naive_vq_attention])
@pytest.mark.parametrize(("block_size", "num_tokens"), [(1, 8), (3, 19), (4, 16), (30, 19)])
def test_equals_dense_attention_to_quantized_keys(
    function, block_size, num_tokens, straight_through
):
    options, found = {"block_size": block_size, "straight_through": straight_through}, []
    for attend in (lambda *x: function(*x, **options)[0], lambda *x: dense(*x, **options)):
        *leaves, codes = (x.requires_grad_() for x in inputs(num_tokens))
        o = attend(*leaves, codes)
        found.append((o, *gradients(o, leaves)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    assert all(x.any() for x in found[1])


@pytest.mark.parametrize("function", [vq_attention, in_blocks, naive_vq_attention])
@pytest.mark.parametrize("straight_through", STRAIGHT_THROUGH)
def test_gradients_by_hand(function, straight_through):
    """Two keys of one code, half the weight each: through codes, a query cannot tell them apart."""
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
        for x in ([0.0, 3.0], [1.0, 2.0], [5.0, 9.0])
    )
    beta, codes = torch.full((1,), 2.0, dtype=torch.float64), torch.full((1, 1, 1), 1.5).double()
    o, _ = function(q, k, v, beta, codes, block_size=2, straight_through=straight_through)
    assert o.flatten().tolist() == [5.0, 7.0]
    found = [x.flatten() for x in torch.autograd.grad(o[0, 1].sum(), [q, k, v])]
    # beta times weight (value - output) is -2 for the first key and 2 for the second
    of_query = {"keys": -2 * 1.5 + 2 * 1.5, "scores": -2 * 1.0 + 2 * 2.0}[straight_through]
    for got, expected in zip(found, ([0.0, of_query], [-6.0, 6.0], [0.5, 0.5]), strict=True):
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("straight_through", STRAIGHT_THROUGH)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_nothing_depends_on_how_many_rows_are_taken_at_once(rows, straight_through, monkeypatch):
    found, options = [], {"block_size": C, "straight_through": straight_through}
    state = state_after(7, 0, 2, 7, 19)
    for at_once in (rows, 5):
        monkeypatch.setattr("ovq.ops.vq_attention._rows_at_once", lambda *_, n=at_once: n)
        leaves = [x.requires_grad_() for x in inputs(23, seed=1, num_rows=5)]
        o, after = vq_attention(*leaves, state, **options)
        torch.cat([o.flatten(), after.value_means.flatten()]).sin().sum().backward()
        gradients = [x.grad for x in leaves if x.grad is not None]
        assert len(gradients) == 4  # the codes have none
        found.append([o, *after.tensors().values(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_outputs_and_states_do_not_depend_on_what_goes_straight_through():
    found = []
    for straight_through in STRAIGHT_THROUGH:
        leaves = [x.requires_grad_() for x in inputs(19)]
        state = state_after(4, 7)
        o, after = vq_attention(*leaves, state, block_size=C, straight_through=straight_through)
        found.append([o, *after.tensors().values()])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_quantization_is_what_differs_from_attention_to_the_keys():
    """With a code for every key nothing is lost; with few, something is."""
    q, k, v, beta, codes = inputs(12, num_rows=1)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q * beta[:, None], k, v)),
        is_causal=True, scale=1.0, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    o, _ = vq_attention(q, k, v, beta, k[0].transpose(0, 1), block_size=C)
    torch.testing.assert_close(o, expected, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(vq_attention(q, k, v, beta, codes, block_size=C)[0], expected)


@pytest.mark.parametrize("block_size", [1, C])
@pytest.mark.parametrize("lengths", [None, (0, 7), (2, 6), (5, 12)], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "straight_through"),
    [*product(LENGTHS, ["keys"]), (0, "scores"), (1, "scores"), (19, "scores")],
)
def test_blocks_equal_the_recurrence(num_tokens, straight_through, lengths, block_size):
    """Rows at any place of their block: outputs, states, and gradients through both."""
    found, options = [], {"block_size": block_size, "straight_through": straight_through}
    for function in (vq_attention, in_blocks, naive_vq_attention):
        *leaves, codes = inputs(num_tokens)
        leaves = [x.requires_grad_() for x in leaves]
        state = None if lengths is None else state_after(*lengths, block_size=block_size)
        if state is not None:
            leaves += [getattr(state, name).requires_grad_() for name in REAL]
        o, after = function(*leaves[:4], codes, state, **options)
        real = [o, *(getattr(after, name) for name in REAL)]
        loss = sum((x * x.detach().cos()).sum() for x in real) + 0 * leaves[0].sum()
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        found.append([*real, *grads, *(getattr(after, name) for name in WHOLE)])
    for *others, expected in zip(*found, strict=True):
        for got in others:
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def test_state_by_hand():
    """Blocks of 1, codes 0 and 10: after four tokens three are in the means."""
    k = torch.tensor([1.0, 9.0, 2.0, 11.0]).view(1, 4, 1, 1)
    v = torch.tensor([1.0, 5.0, 3.0, 7.0]).view(1, 4, 1, 1)
    codes = torch.tensor([0.0, 10.0]).view(1, 2, 1)
    _, state = vq_attention(torch.zeros_like(k), k, v, torch.ones(1), codes, block_size=1)
    assert state.value_means.flatten().tolist() == [2.0, 5.0]
    assert state.counts.flatten().tolist() == [2, 1]
    assert state.tail_keys.flatten().tolist() == [10.0]
    assert state.tail_values.flatten().tolist() == [7.0]
    assert state.tail_assigned.flatten().tolist() == [1]
    assert state.tail_length.tolist() == [1]


@pytest.mark.parametrize("cuts", [[1], [3, 6], [5, 5, 17], list(range(1, 19))])
def test_any_split_equals_one_call(cuts):
    """The last one is decoding."""
    *tokens, beta, codes = inputs(19)
    whole, whole_state = vq_attention(*tokens, beta, codes, block_size=C)
    state, outputs = None, []
    for start, stop in pairwise([0, *cuts, 19]):
        part = [x[:, start:stop] for x in tokens]
        o, state = vq_attention(*part, beta, codes, state, block_size=C)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-12, rtol=1e-12)
    for name in REAL:
        torch.testing.assert_close(
            getattr(state, name), getattr(whole_state, name), atol=1e-12, rtol=1e-12
        )
    assert all(getattr(state, n).equal(getattr(whole_state, n)) for n in WHOLE)


def test_nearest_codes_is_the_argmin_of_distances_and_ties_go_to_the_lower_code():
    _, k, _, _, codes = inputs(50)
    expected = torch.cdist(k.transpose(1, 2), codes[None]).argmin(-1).transpose(1, 2)
    assert nearest_codes(k, codes).equal(expected)
    assert nearest_codes(k, codes[:, [3, 3, 3]]).eq(0).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nearest_codes(k.float(), codes.float()).equal(expected)


def test_gradient_goes_straight_through():
    _, k, _, _, codes = inputs(5)
    k, codes = k.requires_grad_(), codes.requires_grad_()
    assigned = nearest_codes(k, codes)
    k_hat = quantized(k, codes, assigned)
    assert k_hat[1, 4, 1].equal(codes[1, assigned[1, 4, 1]])
    weight = torch.randn_like(k)
    found = torch.autograd.grad((k_hat * weight).sum(), [k, codes], allow_unused=True)
    assert found[0].equal(weight)
    assert found[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_float32_and_output_in_the_inputs_dtype(dtype):
    *tokens, beta, codes = inputs(40)
    assigned = nearest_codes(tokens[1], codes)
    options = {"block_size": C, "assigned": assigned}
    exact, exact_state = vq_attention(*tokens, beta, codes, **options)
    rounded = [x.to(dtype) for x in tokens]
    o, state = vq_attention(*rounded, beta.float(), codes.float(), **options)
    assert o.dtype == dtype
    assert all(getattr(state, name).dtype == torch.float32 for name in REAL)
    assert all(getattr(state, name).equal(getattr(exact_state, name)) for name in WHOLE)
    error = 8 * torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(o.double(), exact, atol=error, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = vq_attention(*rounded, beta.float(), codes.float(), **options)
    assert under.equal(o)


def test_incoming_state_is_untouched():
    state = state_after(5, 12)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    for num_tokens in (1, 10):
        vq_attention(*inputs(num_tokens), state, block_size=C)
    for name, tensor in state.tensors().items():
        assert tensor.equal(before[name]), name


def test_bytes_do_not_depend_on_the_tokens():
    sizes = {state_after(n).num_bytes for n in (0, 1, 5, 12)}
    assert sizes == {2 * (S * (6 * 8 + 8) + (2 * C - 1) * (5 * 8 + 6 * 8 + 8)) + 8}
    assert state_after(5).to("meta").num_bytes in sizes
    with pytest.raises(ValueError, match="states must share one shape"):
        VQState.concat([state_after(5), state_after(5, block_size=2)])


@pytest.mark.plain
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, b, c: (q[0], k, v, b, c), "q must be a floating-point tensor of 4 axes"),
        (lambda q, k, v, b, c: (q, k, v[:, :, :1], b, c), "v must have the batch, tokens and"),
        (lambda q, k, v, b, c: (q[:, :, :3], k, v, b[:3], c), "heads of k must divide .* 2 and 3"),
        (lambda q, k, v, b, c: (q, k, v, b[:2], c), r"beta must be \[H\] = \[4\], got \(2,\)"),
        (lambda q, k, v, b, c: (q, k, v, b, c[:1]), r"codes must be .* \[2, S, 5\], got \(1, 7"),
        (lambda q, k, v, b, c: (q, k, v, b, c[:, :0]), r"codes must be .* got \(2, 0, 5\)"),
        (
            lambda q, k, v, b, c: (q, k, v, b, c, state_after(3)),
            "one row a sequence, 2 here, got 1",
        ),
        (
            lambda q, k, v, b, c: (q, k, v, b, c, state_after(3, 3, block_size=2)),
            "state must be of block_size 3, got one of 2",
        ),
        (
            lambda q, k, v, b, c: (q, k, v, b, c[:, :4], state_after(3, 3)),
            r"state must hold value means \(2, 4, 6\) .* got \(2, 7, 6\)",
        ),
    ],
)
def test_bad_inputs_raise(change, message):
    with pytest.raises(ValueError, match=message):
        vq_attention(*change(*inputs(5)), block_size=C)


@pytest.mark.plain
def test_bad_options_raise():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        vq_attention(*inputs(5), block_size=0)
    with pytest.raises(ValueError, match=r"straight_through must be one of .*, got 'values'"):
        vq_attention(*inputs(5), block_size=C, straight_through="values")
    with pytest.raises(ValueError, match=r"assigned must be .* \(2, 5, 2\), got \(2, 5\)"):
        vq_attention(*inputs(5), block_size=C, assigned=torch.zeros(2, 5, dtype=torch.int64))


@pytest.mark.plain
@pytest.mark.parametrize("straight_through", STRAIGHT_THROUGH)
def test_compiled_equals_eager_at_any_length(straight_through):
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(vq_attention, fullgraph=True, backend=counter)
    options = {"block_size": C, "straight_through": straight_through}
    state = state_after(5, 12)
    for num_tokens in (5, 6, 8, 9, 13):
        found = compiled(*inputs(num_tokens), state, **options)
        expected = vq_attention(*inputs(num_tokens), state, **options)
        torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-12)
        for name in REAL:
            torch.testing.assert_close(getattr(found[1], name), getattr(expected[1], name))
    assert 1 <= counter.frame_count <= 3
    for num_tokens in (2, 7, 13):
        found, expected = (f(*inputs(num_tokens), **options) for f in (compiled, vq_attention))
        torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-12)
