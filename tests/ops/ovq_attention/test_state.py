"""The state in one sentence: each slot holds the mean of its members, and their number."""

import pytest
import torch

from .cases import (
    IMPLEMENTATIONS,
    REAL_FIELDS,
    VARIANTS,
    WHOLE_FIELDS,
    assert_bits_equal,
    assert_near,
    gradients,
    make_config,
    make_inputs,
    phased_state,
    real_tensors,
    run,
    state_bits,
    unit_vectors,
    zipf_vectors,
)

C = 5
by_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def scheduled(t: int, config) -> int:
    """The growth schedule as DESIGN has it, before the bounds by n, n + C and N."""
    N = config.num_centroids
    by_name = {
        "saturating": max(1, int(N * t / (t + N))),
        "linear": max(1, int(N * t / (config.growth_length or 1))),
        "immediate": min(N, t),
    }
    return min(N, by_name[config.growth])


@pytest.mark.parametrize("keys", [unit_vectors, zipf_vectors])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "constant" not in name])
@by_implementation
def test_means_and_counts_are_those_of_the_members(impl, variant, keys):
    """Over three calls, the members known from the slots that each call returned."""
    config, lengths = make_config(7, C, **VARIANTS[variant]), (13, 4, 22)
    inputs = make_inputs(2, sum(lengths), keys=keys, seed=5)
    state, joined, start = None, torch.full((2, sum(lengths), 2), -1), 0
    for length in lengths:
        before = 0 if state is None else int(state.tail_length[0])
        piece = inputs.tokens(start, start + length)
        _, state, slots = run(piece, config, impl, state)
        if before:
            joined[:, start - before : start] = slots.tail[:, :before]
            assert (slots.tail[:, before:] == -1).all()
        joined[:, start : start + length] = slots.tokens
        start += length
        absorbed = max(0, start // C * C - config.window_size)
        assert state.num_absorbed.tolist() == [absorbed] * 2
        assert state.tail_length.tolist() == [start - absorbed] * 2
        assert state.num_active.tolist() == [scheduled(absorbed, config) if absorbed else 0] * 2
        assert (joined[:, :absorbed] >= 0).all()
        assert (joined[:, absorbed:start] == -1).all()
        for name, tokens in (("tail_keys", inputs.k), ("tail_values", inputs.v)):
            tail = getattr(state, name)
            assert torch.equal(tail[:, : start - absorbed], tokens[:, absorbed:start])
            assert not tail[:, start - absorbed :].any()
    assert (state.counts.sum(-1) == absorbed).all()
    for row, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for slot in range(config.num_centroids):
            members = joined[row, :, head] == slot
            assert int(state.counts[row, head, slot]) == int(members.sum())
            assert members.any() == (slot < int(state.num_active[row]))
            for name, tokens in (("key_means", inputs.k), ("value_means", inputs.v)):
                mean = getattr(state, name)[row, head, slot]
                own = tokens[row, members, head]
                assert_near(mean, own.mean(0) if members.any() else 0 * mean, 1e-13, name)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@by_implementation
def test_dtypes(impl, dtype):
    """Output as the input; state in float32, in float64 for float64 alone; counts in int64."""
    config, inputs = make_config(6, C), make_inputs(2, 13, dtype=dtype)
    o, state, slots = run(inputs, config, impl)
    o_after, after, _ = run(inputs, config, impl, state)
    assert o.dtype == o_after.dtype == dtype
    assert o.isfinite().all()
    assert o_after.isfinite().all()
    assert slots.tokens.dtype == slots.tail.dtype == torch.int64
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for held in (state, after):
        assert all(getattr(held, name).dtype == wide for name in REAL_FIELDS)
        assert all(getattr(held, name).dtype == torch.int64 for name in WHOLE_FIELDS)
    means = torch.zeros(2, 2, 6, 5, dtype=torch.float64)
    for row, head, slot in ((r, g, m) for r in range(2) for g in range(2) for m in range(6)):
        members = slots.tokens[row, :, head] == slot
        if members.any():
            means[row, head, slot] = inputs.k[row, members, head].double().mean(0)
    assert_near(state.key_means, means, {torch.float64: 1e-14}.get(dtype, 1e-6), "key_means")


@by_implementation
def test_autocast_changes_neither_dtype_nor_state(impl):
    """Under ``torch.autocast`` the operator runs, and the state stays as wide as it was."""
    config, inputs = make_config(6, C), make_inputs(2, 13, dtype=torch.float32)
    leaves = inputs.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state, slots = run(leaves, config, impl)
    grads = gradients(real_tensors(o, state), leaves)
    assert o.dtype == torch.float32
    assert state.key_means.dtype == torch.float32
    assert all(g.isfinite().all() and g.any() for g in grads)
    fed = run(inputs, config, impl, slots=slots)
    assert_near(o, fed[0], 0.03)
    assert_near(state.key_means, fed[1].key_means, 1e-2, "key_means")


@by_implementation
def test_identical_keys_follow_the_tie_rules(impl):
    """The earlier tokens of each chunk seed, in order; all others join slot 0, the lowest."""
    config = make_config(8, C)
    key = unit_vectors(5, seed=1)
    inputs = make_inputs(1, 4 * C)._replace(k=key.expand(1, 4 * C, 2, 5))
    state, slots = run(inputs, config, impl)[1:]
    expected, n = [], 0
    for t in range(C, 4 * C + 1, C):
        seeds = list(range(n, scheduled(t, config)))
        n += len(seeds)
        expected += seeds + [0] * (C - len(seeds))
    assert n == int(state.num_active) > 3
    for head in range(2):
        assert slots.tokens[0, :, head].tolist() == expected
    near = inputs._replace(k=inputs.k + 1e-9 * unit_vectors(1, 4 * C, 2, 5, seed=2))
    assert torch.equal(run(near, config, impl)[2].tokens, slots.tokens)  # below the grid


@pytest.mark.parametrize("window_chunks", [0, 2])
@by_implementation
def test_size_in_bytes_is_what_the_tensors_hold_and_constant(impl, window_chunks):
    config = make_config(6, C, window_chunks=window_chunks)
    sizes, state = set(), None
    for num_tokens in (0, 1, C, 31):
        _, state, _ = run(make_inputs(3, num_tokens, dtype=torch.float32), config, impl, state)
        tensors = [getattr(state, name) for name in REAL_FIELDS + WHOLE_FIELDS]
        assert state.num_bytes == sum(t.numel() * t.element_size() for t in tensors)
        sizes.add(state.num_bytes)
    L = (window_chunks + 1) * C
    real = 3 * 2 * (6 + L) * (5 + 3) * 4  # rows, heads, slots and tail places, K + V, float32
    assert sizes == {real + 3 * 2 * 6 * 8 + 3 * 3 * 8}


@pytest.mark.parametrize("variant", ["paper", "random", "constant-unit-linear", "window"])
@by_implementation
def test_the_same_call_twice_is_bitwise_the_same(impl, variant):
    config = make_config(6, C, **VARIANTS[variant])
    start, found = phased_state(config, (3, 17)), []
    for _ in range(2):
        leaves = make_inputs(2, 24, keys=zipf_vectors).leaves()
        o, state, _ = run(leaves, config, impl, start)
        grads = dict(zip("qkvb", gradients(real_tensors(o, state), leaves), strict=True))
        found.append({"o": o.detach(), **state_bits(state), **grads})
    assert_bits_equal(*found)


@by_implementation
def test_random_seeding_depends_on_seed_and_head_and_not_on_keys(impl):
    """Orthonormal keys: all but the seeds tie at product 0 and join slot 0, so each other slot
    holds its seed alone. Which tokens those are is the same for two bases."""

    def seeds(seed: int, draw: int) -> list[list[int]]:
        config = make_config(4, 12, growth="immediate", seeding="random", seed=seed)
        basis = torch.linalg.qr(unit_vectors(12, 12, seed=draw)).Q
        inputs = make_inputs(1, 12, H=8, G=8, K=12)
        inputs = inputs._replace(k=basis[None, :, None].expand(1, 12, 8, 12))
        slots = run(inputs, config, impl)[2].tokens[0]
        return [[int((slots[:, g] == m).nonzero()) for m in (1, 2, 3)] for g in range(8)]

    found = seeds(0, 1)
    assert all(head == sorted(head) for head in found)  # slots open in order of position
    assert found == seeds(0, 2)
    assert found != seeds(1, 1)
    assert len({tuple(head) for head in found}) > 1


@by_implementation
def test_counts_stay_exact_and_means_accurate_after_a_long_stream(impl):
    """Past 2^24 tokens float32 cannot count: a slot of 2^25 members still counts each token."""
    config = make_config(1, C)
    _, state, _ = run(make_inputs(1, C, dtype=torch.float32), config, impl)
    many = 2**25 + 3  # odd, and a multiple of C
    state = state.map(lambda x: x if x.is_floating_point() else torch.where(x == C, many, x))
    assert state.counts.tolist() == [[[many], [many]]]
    inputs = make_inputs(1, 7 * C, dtype=torch.float32)
    o, after, _ = run(inputs, config, impl, state)
    assert after.counts.tolist() == [[[many + 7 * C], [many + 7 * C]]]
    assert after.num_absorbed.tolist() == [many + 7 * C]
    assert o.isfinite().all()
    total = state.key_means[0, :, 0].double() * many + inputs.k[0].double().sum(0)
    assert_near(after.key_means[0, :, 0], total / (many + 7 * C), 1e-6, "key_means")
