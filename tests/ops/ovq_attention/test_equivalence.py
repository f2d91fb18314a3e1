"""Every faster implementation equals ``reference``: outputs, gradients, state and slots."""

from functools import cache

import pytest
import torch

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    Inputs,
    assert_all_near,
    assert_near,
    assert_states_near,
    gradients,
    make_config,
    make_inputs,
    phased_state,
    real_tensors,
    relative_error,
    run,
    state_leaves,
    uneven_vectors,
    unit_vectors,
    zipf_vectors,
)

FAST = [name for name in IMPLEMENTATIONS if name != "reference"]
C = 6
LENGTHS = (0, 1, 2, C - 1, C, C + 1, 3 * C + 5)
LOW_PRECISION = (torch.float32, torch.bfloat16)


def compare(inputs: Inputs, config, impl: str, state=None, **options) -> None:
    """Both implementations in float64, with a random functional of all they return as the loss."""
    found = {}
    for name in ("reference", impl):
        leaves, state_in = list(inputs.leaves()), state
        own = Inputs(*leaves)
        if state is not None:
            state_in, of_state = state_leaves(state)
            leaves += of_state
        o, after, slots = run(own, config, name, state_in, **options)
        found[name] = o, after, slots, gradients(real_tensors(o, after), leaves)
    (o, after, slots, grads), expected = found[impl], found["reference"]
    for mine, reference in zip(slots, expected[2], strict=True):
        assert torch.equal(mine, reference)
    assert_near(o, expected[0], 1e-10)
    assert_states_near(after, expected[1], 1e-10)
    assert_all_near(grads, expected[3], 1e-10, "gradient of q, k, v, beta, state:")


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_from_the_start(impl, variant, num_tokens):
    compare(
        make_inputs(T=num_tokens, seed=num_tokens), make_config(5, C, **VARIANTS[variant]), impl
    )


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_from_a_state_at_unlike_phases(impl, variant, num_tokens):
    """Rows with an empty past, a partial chunk only, a full chunk only, and several with a rest."""
    config = make_config(5, C, **VARIANTS[variant])
    state = phased_state(config, (0, C - 2, C, 4 * C + 1), keys=zipf_vectors)
    inputs = make_inputs(4, num_tokens, seed=num_tokens + 10, keys=zipf_vectors)
    compare(inputs, config, impl, state)


@pytest.mark.parametrize("num_tokens", [1, 2 * C, 3 * C + 1])
@pytest.mark.parametrize("window_chunks", [1, 2, 3])
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_while_windows_fill(impl, window_chunks, num_tokens):
    """Rows whose windows hold nothing, a part, all, and all of it with the most that can wait."""
    config = make_config(5, C, window_chunks=window_chunks)
    most = 5 * C + config.tail_size - 1
    state = phased_state(config, (0, C, 2 * C - 1, config.window_size, most), keys=zipf_vectors)
    assert int(state.tail_length.max()) == config.tail_size - 1
    compare(make_inputs(5, num_tokens, seed=num_tokens, keys=zipf_vectors), config, impl, state)


@pytest.mark.parametrize("variant", ["direction", "window-random-direction", "window-novel"])
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_for_keys_of_unlike_norms(impl, variant):
    config = make_config(5, C, **VARIANTS[variant])
    state = phased_state(config, (3, 4 * C + 1), keys=uneven_vectors)
    compare(make_inputs(2, 5 * C + 2, keys=uneven_vectors), config, impl, state)


@pytest.mark.parametrize(
    ("num_centroids", "window_chunks"), [(1, 0), (2, 0), (40, 0), (2, 2)], ids=str
)
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64])
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_at_other_sizes(impl, chunk_size, num_centroids, window_chunks):
    """Chunks of one token, chunks longer than the sequence, one slot, slots never all filled."""
    config = make_config(num_centroids, chunk_size, window_chunks=window_chunks)
    compare(make_inputs(1, 35), config, impl)


@pytest.mark.parametrize(
    "sizes",
    [
        {"H": 1, "G": 1, "K": 1, "V": 1},
        {"H": 6, "G": 1, "K": 2, "V": 9},
        {"H": 6, "G": 3, "K": 9, "V": 2},
        {"H": 3, "G": 3, "K": 4, "V": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_for_other_heads(impl, sizes):
    compare(make_inputs(2, 29, **sizes), make_config(5, C), impl)


@pytest.mark.parametrize("window_chunks", [0, 1, 2])
@pytest.mark.parametrize("impl", FAST)
def test_equals_reference_on_packed_sequences(impl, window_chunks):
    config = make_config(5, C, window_chunks=window_chunks)
    ends = torch.tensor([0, 0, 9, 9, 4 * C + 9, 4 * C + 10])
    state = phased_state(config, (3, 0, C, 2 * C + 5, 4 * C - 1))
    inputs = make_inputs(1, 4 * C + 10)
    compare(inputs, config, impl, cu_seqlens=ends)
    compare(inputs, config, impl, state, cu_seqlens=ends)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strides_do_not_matter(impl):
    inputs, config = make_inputs(2, 17), make_config()
    expected = run(inputs, config, impl)
    strided = Inputs(
        inputs.q.transpose(1, 2).contiguous().transpose(1, 2),
        inputs.k.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        inputs.v.repeat_interleave(2, dim=-1)[..., ::2],
        inputs.beta.repeat_interleave(2)[::2],
    )
    assert not any(x.is_contiguous() for x in strided)
    assert_near(run(strided, config, impl)[0], expected[0], 1e-14)
    one_head = inputs.k[:, :, :1]
    shared = inputs._replace(k=one_head.expand(-1, -1, 2, -1))
    copied = inputs._replace(k=one_head.repeat(1, 1, 2, 1))
    assert_near(run(shared, config, impl)[0], run(copied, config, impl)[0], 1e-14)


@pytest.mark.parametrize("keys", [unit_vectors, zipf_vectors])
@pytest.mark.parametrize("variant", VARIANTS)
def test_slots_do_not_depend_on_the_dtype_or_the_implementation(variant, keys):
    """Unit-norm keys, a dictionary of real size: what the grid of 2^-16 is for."""
    config = make_config(24, 16, **VARIANTS[variant])
    inputs = make_inputs(1, 100, H=2, K=16, V=2, keys=keys, seed=4)
    expected = run(inputs, config, "reference")[2].tokens
    for impl in IMPLEMENTATIONS:
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(run(inputs.to(dtype), config, impl)[2].tokens, expected)


def results(inputs: Inputs, config, impl: str, state, slots) -> list[torch.Tensor]:
    """Output, returned state and gradients on fed slots."""
    leaves = list(inputs.leaves())
    state, of_state = state_leaves(state)
    o, after, _ = run(Inputs(*leaves), config, impl, state, slots=slots)
    tensors = real_tensors(o, after)
    return [x.detach() for x in tensors] + gradients(tensors, leaves + of_state)


@cache
def lost_by_plain_attention(dtype: torch.dtype) -> float:
    """The largest relative error that plain torch attention makes here, forward or backward."""
    found = {}
    for own in (torch.float64, dtype):
        leaves = make_inputs(4, 40, seed=1, G=4).to(dtype).to(own).leaves()
        q, k, v, beta = leaves
        logits = beta[:, None, None] * torch.einsum("bihk,bjhk->bhij", q, k)
        hidden = torch.ones(40, 40).triu(1).bool()
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        o = torch.einsum("bhij,bjhv->bihv", weights, v)
        found[own] = [o.detach(), *gradients([o], leaves)]
    return max(
        relative_error(a, b) for a, b in zip(found[dtype], found[torch.float64], strict=True)
    )


@pytest.mark.parametrize("variant", ["paper", "constant", "unit", "window", "direction"])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_low_precision_loses_what_plain_attention_loses(impl, dtype, variant):
    """On the slots of the float64 run, with the state as float32 holds it."""
    config = make_config(5, C, **VARIANTS[variant])
    inputs = make_inputs(4, 3 * C + 5, seed=2).to(dtype).to(torch.float64)
    state = phased_state(config, (0, C - 2, C, 4 * C + 1))
    state = state.map(lambda x: x.float().double() if x.is_floating_point() else x)
    slots = run(inputs, config, "reference", state)[2]
    expected = results(inputs, config, "reference", state, slots)
    in_float32 = state.map(lambda x: x.float() if x.is_floating_point() else x)
    found = results(inputs.to(dtype), config, impl, in_float32, slots)
    tolerance = 4 * lost_by_plain_attention(dtype)
    assert found[0].dtype == dtype
    assert 1e-8 < tolerance < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert_all_near(found, expected, tolerance, "o, state, gradients:")
    assert_all_near(found[1:5], expected[1:5], 1e-6, "state, in float32 whatever the input:")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_own_slots_fed_back_change_nothing(impl):
    config = make_config(5, C)
    state, inputs = phased_state(config, (2, 17)), make_inputs(2, 20)
    o, after, slots = run(inputs, config, impl, state)
    o_fed, after_fed, slots_fed = run(inputs, config, impl, state, slots=slots)
    assert torch.equal(slots_fed.tokens, slots.tokens)
    assert torch.equal(slots_fed.tail, slots.tail)
    assert torch.equal(o_fed, o)
    assert_states_near(after_fed, after, 0.0)


@pytest.mark.parametrize("impl", FAST)
def test_other_slots_are_obeyed(impl):
    """Slots that no rule would choose: the last slot for every token that has a choice."""
    config, inputs = make_config(5, C), make_inputs(1, 3 * C)
    slots = run(inputs, config, "reference")[2]
    other = slots.tokens.clone()
    last = int(other[:, : 2 * C].max())
    other[:, 2 * C :] = torch.where(other[:, 2 * C :] <= last, last, other[:, 2 * C :])
    assert not torch.equal(other, slots.tokens)
    compare(inputs, config, impl, slots=slots._replace(tokens=other))
    state = run(inputs, config, impl, slots=slots._replace(tokens=other))[1]
    assert int(state.counts[0, 0, last]) >= int((other[0, 2 * C :, 0] == last).sum())
