"""Diagnostics against loops over the members of every slot, and the weights of a read."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ovq import OVQState
from ovq.ops.ovq_attention import diagnose, num_active_by_chunk, quantization_error
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.ops.ovq_attention.diagnostics import error_of_unit_keys, read_weights
from ovq.ops.ovq_attention.state import Slots
from tests.ops.ovq_attention.cases import (
    VARIANTS,
    assert_near,
    make_config,
    make_inputs,
    phased_state,
    run,
    unit_vectors,
    zipf_vectors,
)

TOLERANCE = 1e-12
by_variant = pytest.mark.parametrize("variant", sorted(VARIANTS))


def members_of(slots, row, head):
    """The positions of the tokens of each slot, of one row and head."""
    members = {}
    for position, slot in enumerate(slots[row, :, head].tolist()):
        if slot >= 0:
            members.setdefault(slot, []).append(position)
    return members


def error_by_members(x, means, members):
    """Relative error and fraction of the variance of one row and head, token by token."""
    lost = norm = 0.0
    absorbed = [x[i] for tokens in members.values() for i in tokens]
    for slot, tokens in members.items():
        for i in tokens:
            lost += float((x[i] - means[slot]).norm()) ** 2
            norm += float(x[i].norm()) ** 2
    mean = sum(absorbed) / len(absorbed)
    variance = sum(float((each - mean).norm()) ** 2 for each in absorbed)
    return math.sqrt(lost / norm), lost / variance


@by_variant
@pytest.mark.parametrize(("keys", "T"), [(unit_vectors, 4), (unit_vectors, 23), (zipf_vectors, 27)])
def test_every_figure_is_that_of_the_members(variant, keys, T):
    config = make_config(**VARIANTS[variant])
    inputs = make_inputs(2, T + config.window_size, keys=keys)
    _, state, slots = run(inputs, config, "reference")
    found = diagnose(state)
    error = quantization_error(state, inputs.k, inputs.v, slots.tokens)
    for row in range(2):
        for head in range(2):
            members = members_of(slots.tokens, row, head)
            sizes = torch.tensor([len(tokens) for tokens in members.values()]).double()
            share = sizes / sizes.sum()
            perplexity = float((-(share * share.log()).sum()).exp())
            assert found.perplexity[row, head].item() == pytest.approx(perplexity)
            assert found.num_active[row] == len(members)
            for name, x, means in (
                ("keys", inputs.k, state.key_means),
                ("values", inputs.v, state.value_means),
            ):
                relative, of_variance = error_by_members(
                    x[row, :, head], means[row, head], members
                )  # fmt: skip
                assert getattr(error, name)[row, head].item() == pytest.approx(relative, abs=1e-12)
                fraction = getattr(error, f"{name}_of_variance")[row, head].item()
                assert fraction == pytest.approx(of_variance, abs=1e-12)


@by_variant
@pytest.mark.parametrize("T", [3, 22])
def test_ages_are_those_of_the_first_members(variant, T):
    config = make_config(num_centroids=9, **VARIANTS[variant])
    _, state, slots = run(make_inputs(2, T), config, "reference")
    ages = diagnose(state).slot_ages
    C = config.chunk_size
    for row in range(2):
        for head in range(2):
            firsts = {m: tokens[0] for m, tokens in members_of(slots.tokens, row, head).items()}
            update = {m: (first // C + 1) * C + config.window_size for m, first in firsts.items()}
            expected = [T - update[m] if m in update else -1 for m in range(9)]
            assert ages[row].tolist() == expected


@by_variant
def test_the_schedule_is_what_opens(variant):
    config, inputs = make_config(num_centroids=9, **VARIANTS[variant]), make_inputs(1, 50)
    opened, state = [], None
    for start in range(0, 48, config.chunk_size):
        tokens = inputs.tokens(start, start + config.chunk_size)
        _, state, _ = run(tokens, config, "torch", state)
        opened += state.num_active.tolist()
    assert num_active_by_chunk(config, 50).tolist() == opened
    assert opened[-1] >= 1
    assert opened == sorted(opened)


@given(
    N=st.integers(1, 40), C=st.integers(2, 9), T=st.integers(0, 40), length=st.integers(1, 60),
    growth=st.sampled_from(["saturating", "linear", "immediate"]),
)  # fmt: skip
def test_ages_follow_the_schedule(N, C, T, length, growth):
    config = make_config(N, C, growth=growth, growth_length=length)
    inputs = make_inputs(1, T, H=1, G=1)
    _, state, _ = run(inputs, config, "torch")
    schedule = num_active_by_chunk(config, T).tolist()
    expected = [-1] * N
    for chunk, (before, after) in enumerate(zip([0, *schedule], schedule, strict=False)):
        expected[before:after] = [T - (chunk + 1) * C] * (after - before)
    assert diagnose(state).slot_ages[0].tolist() == expected


@pytest.mark.parametrize("growth", ["saturating", "linear", "immediate"])
@pytest.mark.parametrize("N", [1, 5, 9])
def test_ages_of_a_stream_of_any_length(growth, N):
    """Once no slot opens any more, ages grow with the stream and nothing else does."""
    config = make_config(N, 2, growth=growth, growth_length=31, window_chunks=1)
    _, state, _ = run(make_inputs(1, 2 * N * N + 40, H=1, G=1), config, "torch")
    ages, more = diagnose(state).slot_ages, 2**50
    assert (ages >= 0).sum() == state.num_active
    longer = replace(state, num_absorbed=state.num_absorbed + more)
    assert torch.equal(diagnose(longer).slot_ages, torch.where(ages >= 0, ages + more, -1))


@by_variant
def test_rows_that_are_picked_have_their_own_figures(variant):
    """Rows at unlike phases, one twice, one that has seen nothing; and float32 as float64."""
    config = make_config(**VARIANTS[variant])
    state, rows = phased_state(config, (3, 31, 0, 18)), torch.tensor([3, 0, 3, 2])
    found, picked = diagnose(state), diagnose(state.select_rows(rows))
    for name, figure in vars(found).items():
        torch.testing.assert_close(getattr(picked, name), figure[rows], equal_nan=True)
    low = diagnose(state.map(lambda x: x.float() if x.is_floating_point() else x))
    for name, figure in vars(found).items():
        other = getattr(low, name)
        assert other.dtype == figure.dtype
        torch.testing.assert_close(other, figure, equal_nan=True, atol=1e-6, rtol=1e-6)


def test_ages_are_unknown_where_fed_slots_left_the_schedule():
    inputs, config = make_inputs(1, 8, G=1, H=1), make_config()
    fed = Slots(torch.full((1, 4, 1), -1), torch.zeros(1, 8, 1, dtype=torch.int64))
    _, state, _ = run(inputs, config, "reference", slots=fed)
    assert state.num_active.tolist() == [1]
    assert num_active_by_chunk(config, 8).tolist() == [2, 3]
    assert diagnose(state).slot_ages.tolist() == [[-1] * 6]


@pytest.mark.parametrize(
    "variant", [name for name, fields in sorted(VARIANTS.items()) if "rate" not in fields]
)
def test_the_error_of_unit_keys_needs_no_keys(variant):
    inputs, config = make_inputs(2, 25), make_config(**VARIANTS[variant])
    _, state, slots = run(inputs, config, "reference")
    error = quantization_error(state, inputs.k, inputs.v, slots.tokens)
    assert bool((error.keys > 0.1).all())
    assert_near(error_of_unit_keys(state), error.keys.square(), TOLERANCE)
    assert_near(diagnose(state).unit_key_error, error.keys.square(), TOLERANCE)


def test_the_error_of_unit_keys_is_not_known_at_a_constant_rate():
    _, state, _ = run(make_inputs(2, 61), make_config(rate="constant"), "reference")
    assert bool(error_of_unit_keys(state).isnan().all())


def test_nothing_is_lost_where_every_token_has_a_slot():
    config = make_config(64, growth="immediate")
    inputs = make_inputs(2, 61)
    _, state, slots = run(inputs, config, "reference")
    error = quantization_error(state, inputs.k, inputs.v, slots.tokens)
    for figure in (error.keys, error.values, error.keys_of_variance, error.values_of_variance):
        assert_near(figure, torch.zeros(2, 2, dtype=torch.float64), TOLERANCE)
    assert_near(diagnose(state).perplexity, torch.full((2, 2), 60.0).double(), TOLERANCE)


def test_one_slot_leaves_the_whole_variance():
    inputs, config = make_inputs(2, 60), make_config(1)
    _, state, slots = run(inputs, config, "reference")
    error = quantization_error(state, inputs.k, inputs.v, slots.tokens)
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert_near(error.keys_of_variance, ones, TOLERANCE)
    assert_near(error.values_of_variance, ones, TOLERANCE)
    assert_near(diagnose(state).perplexity, ones, TOLERANCE)


@pytest.mark.parametrize("cut", [1, 4, 15])
def test_a_split_sequence_has_the_same_figures(cut):
    config, inputs = make_config(), make_inputs(2, 21)
    _, whole, slots = run(inputs, config, "reference")
    _, state, first = run(inputs.tokens(0, cut), config, "reference")
    waiting = int(state.tail_length[0])
    _, state, second = run(inputs.tokens(cut, 21), config, "reference", state)
    joined = torch.cat([first.tokens, second.tokens], dim=1)
    joined[:, cut - waiting : cut] = second.tail[:, :waiting]
    for name, figure in vars(diagnose(whole)).items():
        assert_near(getattr(diagnose(state), name), figure, TOLERANCE, name)
    wanted = quantization_error(whole, inputs.k, inputs.v, slots.tokens)
    found = quantization_error(state, inputs.k, inputs.v, joined)
    for name, figure in vars(wanted).items():
        assert_near(getattr(found, name), figure, TOLERANCE, name)


def test_packed_sequences_have_the_figures_of_each_alone():
    config, inputs, ends = make_config(), make_inputs(1, 40), [0, 17, 17, 20, 40]
    cu_seqlens = torch.tensor(ends)
    _, state, slots = run(inputs, config, "reference", cu_seqlens=cu_seqlens)
    found = quantization_error(state, inputs.k, inputs.v, slots.tokens, cu_seqlens=cu_seqlens)
    for row, (start, stop) in enumerate(pairwise(ends)):
        alone = inputs.tokens(start, stop)
        _, single, of_single = run(alone, config, "reference")
        figures = vars(quantization_error(single, alone.k, alone.v, of_single.tokens))
        for name, figure in figures.items():
            torch.testing.assert_close(getattr(found, name)[row], figure[0], equal_nan=True)
        for name, figure in vars(diagnose(single)).items():
            packed = getattr(diagnose(state), name)[row]
            torch.testing.assert_close(packed, figure[0], equal_nan=True)


def test_before_the_first_full_chunk():
    config, inputs = make_config(), make_inputs(2, 3)
    _, waiting, slots = run(inputs, config, "reference")
    empty = OVQState.empty(2, 2, 5, 3, dictionary=config)
    for state, num_tokens in ((waiting, 3), (empty, 0)):
        found = diagnose(state)
        assert found.num_tokens.tolist() == [num_tokens] * 2
        assert found.num_active.tolist() == [0, 0]
        assert found.perplexity.tolist() == [[0.0, 0.0]] * 2
        assert found.slot_ages.tolist() == [[-1] * 6] * 2
        assert bool(found.unit_key_error.isnan().all())
    error = quantization_error(waiting, inputs.k, inputs.v, slots.tokens)
    assert all(bool(figure.isnan().all()) for figure in vars(error).values())


def test_no_rows():
    empty = OVQState.empty(0, 2, 5, 3, dictionary=make_config())
    found = diagnose(empty)
    assert found.slot_ages.shape == (0, 6)
    assert found.perplexity.shape == (0, 2)


def test_diagnostics_change_nothing_and_carry_no_gradient():
    inputs = make_inputs(1, 20).leaves()
    _, state, slots = run(inputs, make_config(), "torch")
    before = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    figures = {
        **vars(diagnose(state)),
        **vars(quantization_error(state, inputs.k, inputs.v, slots.tokens)),
    }
    assert not any(figure.requires_grad for figure in figures.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


@by_variant
def test_the_weights_give_the_output(variant):
    config, inputs = make_config(**VARIANTS[variant]), make_inputs(2, 18)
    state = OVQState.empty(2, 2, 5, 3, dictionary=config, dtype=torch.float64)
    for start in range(0, 18, 4):
        chunk = inputs.tokens(start, min(start + 4, 18))
        q, k, v, beta = chunk
        weights = read_weights(q, k, beta, state)
        of_values = state.value_means.repeat_interleave(2, dim=1)  # [B, H, N, V]
        expected = torch.einsum("bthn,bhnv->bthv", weights.dictionary, of_values)
        exact = torch.cat([state.tail_values, v], dim=1).repeat_interleave(2, dim=2)
        expected = expected + torch.einsum("bths,bshv->bthv", weights.exact, exact)
        total = weights.dictionary.sum(-1) + weights.exact.sum(-1)
        assert_near(total, torch.ones_like(total), TOLERANCE)
        o, state, _ = run(chunk, config, "reference", state)
        assert_near(o, expected, TOLERANCE)
    assert bool((weights.dictionary.sum(-1) > 0.1).any())


@pytest.mark.plain
def test_arguments_that_do_not_fit():
    config, inputs = make_config(), make_inputs(2, 8)
    _, state, slots = run(inputs, config, "reference")
    k, v, joined = inputs.k, inputs.v, slots.tokens
    with pytest.raises(ValueError, match=r"state must have \[rows, G, K, V\] = \[1, 2, 5, 3\]"):
        quantization_error(state, k[:1], v[:1], joined[:1])
    with pytest.raises(ValueError, match="v and slots must share"):
        quantization_error(state, k, v, joined[:, 1:])
    with pytest.raises(ValueError, match=r"slots must lie in \[-1, 6\), got 6 to 6"):
        quantization_error(state, k, v, torch.full_like(joined, 6))
    for ends in ([0, 2, 5], [1, 2, 8], [0, 9, 8]):
        with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T .* got \["):
            quantization_error(
                state, k[:1], v[:1], joined[:1], cu_seqlens=torch.tensor(ends)
            )  # fmt: skip
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        num_active_by_chunk(config, -1)
    with pytest.raises(ValueError, match="at most the 4 tokens of a chunk, got 8"):
        read_weights(inputs.q, k, inputs.beta, state)
    q, beta = inputs.q[:, :4], inputs.beta
    with pytest.raises(
        ValueError, match=r"state must have \[rows, G, K\] = \[1, 2, 5\] .* \[2, 2, 5"
    ):
        read_weights(q[:1], k[:1, :4], beta, state)
    with pytest.raises(ValueError, match=r"state must have \[rows, G, K\] = \[2, 1, 5\]"):
        read_weights(q, k[:, :4, :1], beta, state)
    with pytest.raises(ValueError, match=r"k must share B, T and K with q"):
        read_weights(q, k[:, :3], beta, state)
    with pytest.raises(ValueError, match=r"beta must be \[H\] = \[4\], got \[3\]"):
        read_weights(q, k[:, :4], beta[:3], state)
    _, inside, _ = ovq_attention_with_slots(
        *inputs.tokens(0, 3), dictionary=config, impl="reference"
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"unfinished chunks of \[3, 3\] tokens"):
        read_weights(inputs.q[:, :1], k[:, :1], inputs.beta, inside)
