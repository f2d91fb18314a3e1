"""However tokens reach the operator, each sequence gets the numbers of its own single call."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    Inputs,
    assert_all_near,
    assert_bits_equal,
    assert_near,
    assert_states_near,
    gradients,
    make_config,
    make_inputs,
    phased_state,
    real_tensors,
    run,
    state_bits,
    state_leaves,
    zipf_vectors,
)

C, T = 5, 33
SEQUENTIAL = ["paper", "random", "constant", "novel-unit", "window-unit", "window-random-direction"]
by_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def in_pieces(inputs: Inputs, cuts, config, impl: str, state=None):
    """The call cut at ``cuts``, the state carried; output, state and the slots pieced together."""
    edges = [0, *sorted(cuts), inputs.q.shape[1]]
    outputs, joined = [], torch.full((*inputs.k.shape[:3],), -1)
    for start, stop in pairwise(edges):
        waiting = 0 if state is None else int(state.tail_length[0])
        o, state, slots = run(inputs.tokens(start, stop), config, impl, state)
        outputs.append(o)
        joined[:, start:stop] = slots.tokens
        if waiting and start >= waiting and stop > start:
            joined[:, start - waiting : start] = slots.tail[:, :waiting]
    return torch.cat(outputs, dim=1), state, joined


def assert_split_changes_nothing(config, cuts, impl: str) -> None:
    inputs = make_inputs(2, T, keys=zipf_vectors)
    whole, parts = inputs.leaves(), inputs.leaves()
    o, state, slots = run(whole, config, impl)
    o_parts, state_parts, slots_parts = in_pieces(parts, cuts, config, impl)
    assert torch.equal(slots_parts, slots.tokens)
    assert_near(o_parts, o, 1e-12)
    assert_states_near(state_parts, state, 1e-12)
    found = gradients(real_tensors(o_parts, state_parts), parts)
    expected = gradients(real_tensors(o, state), whole)
    assert_all_near(found, expected, 1e-11, "gradient of q, k, v, beta:")


@by_implementation
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, T), max_size=6), variant=st.sampled_from(sorted(VARIANTS)))
@example(cuts=[0, 0, C, C, T], variant="paper")
@example(cuts=[C - 1, C, C + 1, 2 * C], variant="random")
@example(cuts=[C, 2 * C, 3 * C - 1, 5 * C], variant="window-novel")
def test_any_split_equals_one_call(impl, cuts, variant):
    assert_split_changes_nothing(make_config(6, C, **VARIANTS[variant]), cuts, impl)


@pytest.mark.parametrize("variant", SEQUENTIAL)
@by_implementation
def test_decoding_token_by_token_equals_one_call(impl, variant):
    assert_split_changes_nothing(make_config(6, C, **VARIANTS[variant]), range(1, T), impl)


@pytest.mark.parametrize("num_tokens", [0, 1, 3 * C + 2])
@pytest.mark.parametrize("variant", ["paper", "constant", "window", "window-constant-direction"])
@by_implementation
def test_the_incoming_state_is_used_and_never_changed(impl, variant, num_tokens):
    config = make_config(6, C, **VARIANTS[variant])
    state, leaves = state_leaves(phased_state(config, (4, 23)))
    inputs, before = make_inputs(2, num_tokens), state_bits(state)
    o, after, _ = run(inputs, config, impl, state)
    kept = state_bits(after)
    gradients(real_tensors(o, after), leaves)
    assert_bits_equal(state_bits(state), before)
    run(make_inputs(2, 12, seed=8), config, impl, after.detach())
    assert_bits_equal(state_bits(after), kept)
    assert after.num_tokens.tolist() == [4 + num_tokens, 23 + num_tokens]
    if num_tokens:
        fresh = run(inputs, config, impl)[0]
        assert (o - fresh).norm(dim=-1).amin() > 1e-6  # every token sees the past
    else:
        assert_bits_equal(kept, before)


@by_implementation
def test_no_tokens_from_the_start_is_the_empty_state(impl):
    o, state, slots = run(make_inputs(3, 0), make_config(6, C), impl)
    assert o.shape == (3, 0, 4, 3)
    assert slots.tokens.shape == (3, 0, 2)
    assert state.num_tokens.tolist() == [0, 0, 0]
    assert not any(x.any() for x in state_bits(state).values())


@by_implementation
def test_rows_do_not_see_each_other(impl):
    """Each row equals its own call, to the order of sums in float32; its state as well."""
    config = make_config(6, C)
    inputs = make_inputs(4, T, dtype=torch.float32, keys=zipf_vectors)
    inputs.v[2] *= 1e4  # a neighbour of another size
    o, state, _ = run(inputs, config, impl)
    for row in range(4):
        o_row, state_row, _ = run(inputs.row(row), config, impl)
        assert_near(o[row : row + 1], o_row, 1e-6)
        assert_states_near(state.select_rows(torch.tensor([row])), state_row, 1e-6)


def packed(sequences: list[Inputs]) -> tuple[Inputs, torch.Tensor]:
    """Sequences of one row each, end to end, and where they end."""
    joined = Inputs(
        *(torch.cat(x, dim=1) for x in list(zip(*sequences, strict=True))[:3]), sequences[0].beta
    )
    ends = torch.tensor([0, *(s.q.shape[1] for s in sequences)]).cumsum(0)
    return joined, ends


@pytest.mark.parametrize("ends_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("variant", SEQUENTIAL)
@by_implementation
def test_packed_sequences_equal_their_own_calls(impl, variant, ends_dtype):
    """Also with a state whose rows stand at unlike phases, and empty sequences at either end."""
    config, lengths = make_config(6, C, **VARIANTS[variant]), (0, 7, 1, 0, 2 * C, 4 * C + 3, 0)
    sequences = [make_inputs(1, n, seed=20 + i) for i, n in enumerate(lengths)]
    beta = sequences[0].beta
    sequences = [s._replace(beta=beta) for s in sequences]
    for start in (None, phased_state(config, (3, 4, 4, 0, C, 12, 9))):
        leaves = packed(sequences)[0].leaves()
        ends = packed(sequences)[1].to(ends_dtype)
        state, of_state = (None, []) if start is None else state_leaves(start)
        o, after, slots = run(leaves, config, impl, state, cu_seqlens=ends)
        assert after.num_rows == len(lengths)
        alone, of_alone = (None, []) if start is None else state_leaves(start)
        again = packed(sequences)[0].leaves()
        outputs, states, joined = [], [], []
        for row in range(len(lengths)):
            one = None if alone is None else alone.select_rows(torch.tensor([row]))
            o_row, after_row, slots_row = run(
                again.tokens(int(ends[row]), int(ends[row + 1])), config, impl, one
            )
            outputs.append(o_row)
            states.append(after_row)
            joined.append(slots_row.tokens)
        expected = type(after).concat(states)
        assert torch.equal(slots.tokens, torch.cat(joined, dim=1))
        assert_near(o, torch.cat(outputs, dim=1), 1e-12)
        assert_states_near(after, expected, 1e-12)
        found = gradients(real_tensors(o, after), [*leaves, *of_state])
        wanted = gradients(real_tensors(torch.cat(outputs, 1), expected), [*again, *of_alone])
        assert_all_near(found, wanted, 1e-11, "gradient:")


@by_implementation
@pytest.mark.parametrize("window_chunks", [0, 2])
def test_rows_at_unlike_phases_decode_together(impl, window_chunks):
    config = make_config(6, C, window_chunks=window_chunks)
    past = (0, 1, C - 1, C, 3 * C + 2)
    start, inputs = phased_state(config, past), make_inputs(5, 2 * C + 3, seed=30)
    o, after, _ = in_pieces(inputs, range(1, 2 * C + 3), config, impl, start)
    for row in range(5):
        alone = start.select_rows(torch.tensor([row]))
        o_row, after_row, _ = run(inputs.row(row), config, impl, alone)
        assert_near(o[row : row + 1], o_row, 1e-12)
        assert_states_near(after.select_rows(torch.tensor([row])), after_row, 1e-12)


@by_implementation
def test_selected_rows_go_on_as_the_rows_they_were(impl):
    """As beam search does: reordered, one dropped, one kept twice."""
    config, picked = make_config(6, C), torch.tensor([3, 0, 3, 1])
    start = phased_state(config, (2, 9, 4, 17))
    chosen = start.select_rows(picked)
    assert_bits_equal(
        state_bits(chosen), {name: x[picked] for name, x in state_bits(start).items()}
    )
    inputs = make_inputs(4, 11, seed=31)
    o, _, _ = run(inputs, config, impl, chosen)
    for row, source in enumerate(picked.tolist()):
        alone = start.select_rows(torch.tensor([source]))
        assert_near(o[row : row + 1], run(inputs.row(row), config, impl, alone)[0], 1e-12)
