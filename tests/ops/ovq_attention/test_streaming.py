"""Streams without end: exact counts, accurate means, rows that come and go, and constant memory."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ovq import OVQState

from .cases import (
    Inputs,
    assert_all_near,
    assert_bits_equal,
    assert_near,
    assert_states_near,
    by_implementation,
    generator,
    gradients,
    make_config,
    make_inputs,
    real_tensors,
    run,
    state_bits,
    state_leaves,
    unit_vectors,
)

long_run = pytest.mark.skipif(
    os.environ.get("OVQ_LONG") != "1", reason="takes a minute: set OVQ_LONG=1"
)


def stream(num_tokens: int, piece: int, seed: int = 0) -> Iterator[Inputs]:
    """One head of 8: keys about 40 directions that drift slowly, values about 1; in float32."""
    draw = generator(seed)
    start, end = unit_vectors(2, 40, 8, seed=seed + 1).float()
    for first in range(0, num_tokens, piece):
        size = min(piece, num_tokens - first)
        age = (first + torch.arange(size)[:, None]) / num_tokens
        topic = torch.randint(40, (size,), generator=draw)
        k = (1 - age) * start[topic] + age * end[topic]
        k = k + 0.1 * torch.randn(size, 8, generator=draw)
        k = (k / k.norm(dim=-1, keepdim=True))[None, :, None]
        v = 1.0 + torch.randn(1, size, 1, 8, generator=draw)
        yield Inputs(q=k.flip(1), k=k, v=v, beta=torch.full((1,), 8.0))


def sums_by_slot(tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """The sum of the tokens of each slot, in float64."""
    return torch.zeros(num_slots, tokens.shape[-1]).double().index_add_(0, slots, tokens.double())


def errors_after(impl: str, num_tokens: int) -> dict[str, float]:
    """How far each slot's means are from those of its members in float64: the worst component.

    Counts are held to be exact on the way.
    """
    config, C = make_config(16, 64), 64
    state, counts = None, torch.zeros(16, dtype=torch.int64)
    key_sums, value_sums = torch.zeros(2, 16, 8).double()
    for inputs in stream(num_tokens, piece=512 * C):
        o, state, slots = run(inputs, config, impl, state)
        assert o.isfinite().all()
        joined = slots.tokens[0, :, 0]
        counts += joined.bincount(minlength=16)
        key_sums += sums_by_slot(inputs.k[0, :, 0], joined, 16)
        value_sums += sums_by_slot(inputs.v[0, :, 0], joined, 16)
    assert torch.equal(state.counts[0, 0], counts)
    assert int((counts > 0).sum()) == int(state.num_active) == 15  # 16 t / (t + 16), rounded down
    assert int(counts.sum()) == int(state.num_absorbed) == num_tokens
    exact = {"key_means": key_sums, "value_means": value_sums}
    return {
        name: float((getattr(state, name)[0, 0] - sums / counts.clamp_min(1)[:, None]).abs().max())
        for name, sums in exact.items()
    }


@by_implementation
def test_means_stay_accurate(impl):
    """To some forty times what float32 resolves of a number of size one."""
    errors = errors_after(impl, 200 * 1024)
    assert max(errors.values()) < 5e-6, errors


@long_run
@by_implementation
def test_means_stay_accurate_after_a_million_tokens(impl, record_property):
    errors = errors_after(impl, 1_000_000 // 64 * 64)
    for name, error in errors.items():
        record_property(name, error)
    print(f"{impl} after a million tokens: {errors}")
    assert max(errors.values()) < 1e-5, errors


def with_counts(state: OVQState, many: int) -> OVQState:
    """The state as if every slot had ``many`` members more."""
    num_slots = int(state.num_active[0])
    more = torch.where(state.counts > 0, many, 0)
    return replace(
        state, counts=state.counts + more, num_absorbed=state.num_absorbed + num_slots * many
    )


@by_implementation
@pytest.mark.parametrize("near", [2**24, 2**31, 2**40], ids=["2^24", "2^31", "2^40"])
def test_counts_stay_exact_past_what_a_float_or_an_int_holds(impl, near):
    """From just below; every token is counted, and the means are the weighted ones."""
    config, C = make_config(4, 8), 8
    _, state, _ = run(make_inputs(2, 40 * C, dtype=torch.float32), config, impl)
    state = with_counts(state, near - 100 * C)
    counts, absorbed = state.counts.clone(), state.num_absorbed.clone()
    sums = state.key_means.double() * counts[..., None]
    for call in range(3):
        inputs = make_inputs(2, 100 * C, dtype=torch.float32, seed=call)
        o, state, slots = run(inputs, config, impl, state)
        assert o.isfinite().all()
        absorbed += 100 * C
        for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
            joined = slots.tokens[row, :, head]
            counts[row, head] += joined.bincount(minlength=4)
            sums[row, head] += sums_by_slot(inputs.k[row, :, head], joined, 4)
    assert torch.equal(state.counts, counts)
    assert int(counts.max()) > near
    assert torch.equal(state.num_absorbed, absorbed)
    assert torch.equal(state.counts.sum(-1), absorbed[:, None].expand(-1, 2))
    assert_near(state.key_means, sums / counts[..., None].clamp_min(1), 1e-6, "key_means")


@by_implementation
@pytest.mark.parametrize("near", [2**24, 2**40], ids=["2^24", "2^40"])
@pytest.mark.parametrize("window_chunks", [0, 1])
def test_gradients_with_huge_counts_equal_reference(impl, window_chunks, near):
    """The backward takes members out of slots that it counts and sums up: neither may round."""
    config, C = make_config(4, 8, window_chunks=window_chunks), 8
    _, start, _ = run(make_inputs(2, 40 * C), config, "reference")
    start = with_counts(start, near)
    inputs = make_inputs(2, 5 * C + 3, seed=4).to(torch.float32)
    slots = run(inputs.to(torch.float64), config, "reference", start)[2]
    found = []
    for name, dtype in (("reference", torch.float64), (impl, torch.float32)):
        state = start.map(lambda x, d=dtype: x.float().to(d) if x.is_floating_point() else x)
        state, of_state = state_leaves(state)
        leaves = inputs.to(dtype).leaves()
        o, after, _ = run(leaves, config, name, state, slots=slots)
        tensors = real_tensors(o, after)
        found.append([o.detach(), *gradients(tensors, [*leaves, *of_state])])
    assert_all_near(found[1], found[0], 1e-5, "o, gradients:")


@pytest.mark.parametrize("window_chunks", [0, 2])
@by_implementation
def test_rows_join_leave_and_decode_on_at_their_own_phases(impl, window_chunks):
    """Prefilled apart, joined, decoded token by token, reordered with one dropped and one twice."""
    config, C = make_config(12, 8, window_chunks=window_chunks), 8
    lengths = (0, 1, C - 1, C, 5 * C + 2)
    tokens = make_inputs(5, 5 * C + 2 + 4 * C, K=16, V=8, dtype=torch.float32)
    rows = [tokens.row(row) for row in range(5)]
    joined = OVQState.concat(
        [run(x.tokens(0, n), config, impl)[1] for x, n in zip(rows, lengths, strict=True)]
    )
    assert joined.num_tokens.tolist() == list(lengths)
    before = state_bits(joined)

    def next_tokens(sources: list[int], step: int) -> Inputs:
        parts = [rows[s].tokens(lengths[s] + step, lengths[s] + step + 1) for s in sources]
        return Inputs(*(torch.cat(x) for x in list(zip(*parts, strict=True))[:3]), tokens.beta)

    sources, state = list(range(5)), joined
    outputs: list[list[Tensor]] = [[] for _ in range(5)]
    for step in range(3 * C):
        if step == C + 3:
            picked = [4, 2, 2, 0]
            sources, state = picked, state.select_rows(torch.tensor(picked))
            outputs = [list(outputs[s]) for s in picked]
        o, state, _ = run(next_tokens(sources, step), config, impl, state)
        for row, own in enumerate(o.split(1)):
            outputs[row].append(own)
    for row, source in enumerate(sources):
        end = lengths[source] + 3 * C
        whole, after, _ = run(rows[source].tokens(0, end), config, impl)
        assert_near(torch.cat(outputs[row], dim=1), whole[:, lengths[source] :], 1e-6)
        assert_states_near(state.select_rows(torch.tensor([row])), after, 1e-6)
    assert_bits_equal(state_bits(joined), before)


def kept_bytes(impl: str, num_tokens: int, num_centroids: int, window_chunks: int) -> int:
    """Bytes of all storages that a forward keeps for its backward, which then runs."""
    storages = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    config = make_config(num_centroids, 8, growth="immediate", window_chunks=window_chunks)
    inputs = make_inputs(1, num_tokens, H=2, G=1, K=16, V=16, dtype=torch.float32).leaves()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        o, state, _ = run(inputs, config, impl)
        loss = o.sum() + state.key_means.sum()
    kept = sum(storages.values())
    loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)
    return kept


@pytest.mark.parametrize("window_chunks", [0, 2])
@by_implementation
def test_backward_keeps_a_few_numbers_a_token_and_one_dictionary(impl, window_chunks):
    per_token = {}
    for num_centroids in (32, 512):
        short, long = (kept_bytes(impl, n, num_centroids, window_chunks) for n in (256, 1024))
        per_token[num_centroids] = (long - short) / (1024 - 256)
        assert short >= num_centroids * (16 + 16) * 4  # the hook sees the final dictionary
        assert short <= 3 * num_centroids * (16 + 16 + 2) * 4 + 256 * 400
    qkv = (2 * 16 + 16 + 16) * 4
    # Beside q, k, v: at most the output, a slot and two log-sum-exps.
    assert qkv <= per_token[32] <= qkv + 2 * 16 * 4 + 8 + 2 * 4
    assert per_token[512] == per_token[32]  # a dictionary a chunk would add 8192 bytes a token
