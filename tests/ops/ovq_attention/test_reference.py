"""The definition in numbers: worked by hand, by a naive oracle, and by full attention."""

from math import log, sqrt

import pytest
import torch

from ovq import ovq_attention
from ovq.ops.ovq_attention.dictionary import random_scores

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    assert_near,
    make_config,
    make_inputs,
    run,
    uneven_vectors,
    unit_vectors,
    zipf_vectors,
)
from .oracle import ovq_by_members

LOG_2 = log(2.0)  # as beta: a product x then weighs 2^x


def column(*values: float) -> torch.Tensor:
    """One sequence of numbers as values ``[1, T, 1, 1]``."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None, None]


def points(*values: tuple[float, float]) -> torch.Tensor:
    """One sequence of points of the plane ``[1, T, 1, 2]``."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None, :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nine_tokens_by_hand(impl, dtype):
    """N = 5, C = 2, beta = log 2. Active slots after t tokens: floor(5 t / (t + 5)).

    chunk 1, t = 2: 10/7 -> 1 slot. No centroid yet, all scores equal: the earlier key (1, 0) seeds
        slot 0, and (0, 1) joins it. D_k[0] = (1/2, 1/2), D_v[0] = (6 + 2) / 2 = 4, c = 2.
        o_0 = v_0 = 6; o_1: weights 2^1, 2^2 on 6, 2: 20/6.
    chunk 2, t = 4: 20/9 -> 2 slots. Scores: (1, 1) has 1, (-1, 1) has 0, so (-1, 1) seeds slot 1;
        (1, 1) compares 1 with slot 0 and 0 with the seed: slot 0.
        D_k[0] = (2, 2)/3, D_v[0] = (6 + 2 + 7)/3 = 5, c = 3; D_k[1] = (-1, 1), D_v[1] = -2, c = 1.
        o_2: 2 * 2^1 on 4, 2^2 on 7: 44/8; o_3: 2 * 2^1 on 4, 2^2 on 7, 2^2 on -2: 36/12.
    chunk 3, t = 6: 30/11 -> 2 slots, no seed. (1, 5) has 2/3 * 6 = 4 and -1 + 5 = 4: a tie, the
        lower slot 0 (2/3 is no binary fraction: the grid makes the tie). (-1, -1) has -4/3 and 0:
        slot 1. D_k[0] = (3, 7)/4, D_v[0] = (15 + 1)/4 = 4, c = 4;
        D_k[1] = (-1, 0), D_v[1] = (-2 + 4)/2 = 1, c = 2.
        o_4: 3 * 2^2 on 5, 2^-3 on -2, 2^3 on 1: (60 - 1/4 + 8)/(12 + 1/8 + 8) = 542/161;
        o_5, q = 0: 3 on 5, 1 on -2, 1 on 1, 1 on 4: 18/6.
    chunk 4, t = 8: 40/13 -> 3 slots. Scores: (0, 1) max(7/4, 0), (-7/4, 0) max(-21/16, 7/4): a tie,
        the earlier key (0, 1) seeds slot 2; the other joins slot 1 (7/4 against -21/16 and 0).
        D_k[1] = (-15/4, 0)/3 = (-5/4, 0), D_v[1] = (2 + 10)/3 = 4, c = 3;
        D_k[2] = (0, 1), D_v[2] = 2.
        o_6: 4 * 2^7 on 4, 2 * 2^0 on 1, 2^4 on 2: 2082/530;
        o_7: 4 * 2^-3 on 4, 2 * 2^4 on 1, 2^0 on 2, 2^7 on 10: 1316/161.5.
    tail: o_8: 4 * 2^3 on 4, 3 * 2^-5 on 4, 2^0 on 2, 2^4 on 3: (128 + 3/8 + 2 + 48)/(49 + 3/32).
    """
    q = points((5, 5), (1, 2), (2, 0), (0, 2), (3, 0), (0, 0), (0, 4), (-4, 0), (4, 0)).to(dtype)
    k = points((1, 0), (0, 1), (1, 1), (-1, 1), (1, 5), (-1, -1), (0, 1), (-1.75, 0), (1, 1)).to(
        dtype
    )
    v = column(6, 2, 7, -2, 1, 4, 2, 10, 3).to(dtype)
    beta = torch.tensor([LOG_2], dtype=dtype)
    o, state, slots = run((q, k, v, beta), make_config(5, 2), impl)

    expected = [6, 20 / 6, 44 / 8, 3, 542 / 161, 3, 2082 / 530, 1316 / 161.5, 178.375 / 49.09375]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    assert o.dtype == dtype
    assert_near(o, column(*expected), tolerance)
    assert slots.tokens.flatten().tolist() == [0, 0, 0, 1, 0, 1, 2, 1, -1]
    assert state.counts.tolist() == [[[4, 3, 1, 0, 0]]]
    assert [int(x) for x in (state.num_active, state.num_absorbed, state.tail_length)] == [3, 8, 1]
    means = torch.tensor([[0.75, 1.75], [-1.25, 0], [0, 1], [0, 0], [0, 0]])
    assert_near(state.key_means[0, 0], means, tolerance, "key_means")
    assert_near(
        state.value_means.flatten(), torch.tensor([4.0, 4, 2, 0, 0]), tolerance, "value_means"
    )
    assert state.tail_keys.tolist() == [[[[1, 1]], [[0, 0]]]]
    assert state.tail_values.tolist() == [[[[3]], [[0]]]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # floor(4 t / (t + 4)) at t = 2, 4, ...: 8/6, 16/8, 24/10, 32/12, 40/14, 48/16, 56/18
        ({"num_centroids": 4}, [1, 2, 2, 2, 2, 3, 3]),
        # floor(t / (t + 1)) = 0, but at least one slot
        ({"num_centroids": 1}, [1, 1, 1, 1, 1, 1, 1]),
        # floor(100 t / (t + 100)): 200/102, 400/104, 600/106, 800/108, 1000/110, 1200/112, 1400/114
        ({"num_centroids": 100}, [1, 3, 5, 7, 9, 10, 12]),
        # floor(4 t / 12), at least 1, at most N: 8/12, 16/12, 24/12, 32/12, 40/12, 48/12, 56/12
        ({"num_centroids": 4, "growth": "linear", "growth_length": 12}, [1, 1, 2, 2, 3, 4, 4]),
        # floor(8 t / 4) = 4, 8, 12, but at most C = 2 more a chunk
        ({"num_centroids": 8, "growth": "linear", "growth_length": 4}, [2, 4, 6, 8, 8, 8, 8]),
        # min(5, t)
        ({"num_centroids": 5, "growth": "immediate"}, [2, 4, 5, 5, 5, 5, 5]),
    ],
)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_growth_schedule_by_hand(impl, fields, expected):
    config = make_config(chunk_size=2, **fields)
    inputs, state, found = make_inputs(1, 14), None, []
    for start in range(0, 14, 2):
        _, state, _ = run(inputs.tokens(start, start + 2), config, impl, state)
        found.append(int(state.num_active))
        assert ((state.counts > 0).sum(-1) == state.num_active[:, None]).all()
    assert found == expected


@pytest.mark.parametrize(("seeding", "expected"), [("spread", [0, 1, 0]), ("novel", [0, 0, 1])])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_novel_does_not_seed_a_duplicate(impl, seeding, expected):
    """First chunk (1, 0), (1, 0), (0, 1), two slots. ``spread``: all scores equal, so the first two
    seed and (0, 1), product 0 with both, joins slot 0. ``novel``: scores -inf, 1, 0."""
    config = make_config(2, 3, growth="linear", growth_length=3, seeding=seeding)
    k = points((1, 0), (1, 0), (0, 1))
    _, state, slots = run((k, k, column(1, 2, 3), 1.0), config, impl)
    assert slots.tokens.flatten().tolist() == expected
    assert state.counts.flatten().tolist() == [2, 1]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_unit_centroids_by_hand(impl):
    """C = 2, growth 1, 2, 2 slots. Chunk 1: (1, 0), (0, 1) in slot 0, mean (1/2, 1/2), read as
    (1, 1)/sqrt 2. Chunk 2: (-0.8, 0.6) has -0.2/sqrt 2 and seeds slot 1, (1, 0) joins slot 0: mean
    (2, 1)/3, read as (2, 1)/sqrt 5. Chunk 3: (0, 1) has 1/sqrt 5 = 0.447 with slot 0 and 0.6 with
    slot 1; (0.1, 1) has 1.2/sqrt 5 = 0.537 and 0.52: slot 0 (unscaled 0.4 and 0.52: slot 1).
    The query (sqrt 2, 0) of token 2 has product 1 with slot 0: 2 * 2^1 on 3, and itself,
    sqrt 2 * -0.8, with value 0."""
    k = points((1, 0), (0, 1), (-0.8, 0.6), (1, 0), (0, 1), (0.1, 1))
    q = points(*[(sqrt(2), 0)] * 6)
    config = make_config(5, 2, centroid="unit")
    o, state, slots = run((q, k, column(2, 4, 0, 6, 1, 1), LOG_2), config, impl)
    assert slots.tokens.flatten().tolist() == [0, 0, 1, 0, 1, 0]
    assert_near(o[0, 2], column(4 * 3 / (4 + 2 ** (-0.8 * sqrt(2))))[0, 0], 1e-14)
    means = torch.tensor([[2.1, 2], [-0.8, 1.6]], dtype=torch.float64)
    counts = torch.tensor([[4.0], [2.0]], dtype=torch.float64)
    assert_near(state.key_means[0, 0, :2], means / counts, 1e-14, "means stay unscaled")


@pytest.mark.parametrize(
    ("step", "key", "value"), [(0.25, [0.125, 0.5], 4.0), (0.0, [0.5, 0.5], 3.0)]
)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_constant_rate_by_hand(impl, step, key, value):
    """One slot, C = 2, step 1/4: a new slot is its members' mean, (1/2, 1/2) and 3; then a quarter
    of the way to the mean of its new members, (-1, 1/2) and 7: (1/8, 1/2) and 4. Counts count.
    With step 0 it stays as it was."""
    k = points((1, 0), (0, 1), (-1, 0), (-1, 1))
    config = make_config(1, 2, rate="constant", step=step)
    _, state, _ = run((k, k, column(2, 4, 6, 8), 1.0), config, impl)
    assert_near(state.key_means.flatten(), torch.tensor(key), 1e-14, "key_means")
    assert state.value_means.item() == pytest.approx(value, rel=1e-14)
    assert state.counts.item() == 4


@pytest.mark.parametrize("keys", [unit_vectors, zipf_vectors, uneven_vectors])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_equals_lists_of_members(variant, keys):
    config = make_config(7, 5, **VARIANTS[variant])
    inputs = make_inputs(1, 38, keys=keys, seed=7)
    o, state, slots = run(inputs, config, "reference")
    random = random_scores(torch.arange(38), 2, config.seed)
    for g in range(2):
        of_group = slice(2 * g, 2 * g + 2)
        arrays = (inputs.q[0, :, of_group], inputs.k[0, :, g], inputs.v[0, :, g])
        expected, members, joined = ovq_by_members(
            *(x.numpy() for x in arrays),
            inputs.beta[of_group].numpy(),
            random[:, g].numpy(),
            config,
        )
        assert slots.tokens[0, :, g].tolist() == joined.tolist()
        assert_near(o[0, :, of_group], torch.from_numpy(expected), 1e-13)
        n = len(members)
        assert int(state.num_active) == n
        assert state.counts[0, g, :n].tolist() == [len(m.members) for m in members]
        for m, slot in enumerate(members):
            assert_near(state.key_means[0, g, m], torch.from_numpy(slot.key), 1e-13, "key mean")
            assert_near(state.value_means[0, g, m], torch.from_numpy(slot.value), 1e-13, "value")


def full_attention(q, k, v, beta) -> torch.Tensor:
    """Causal softmax attention, every key exact."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = beta[:, None, None] * torch.einsum("bihk,bjhk->bhij", q, k)
    later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


@pytest.mark.parametrize("window_chunks", [0, 1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("keys", [unit_vectors, zipf_vectors, uneven_vectors])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_immediate_growth_is_full_attention(impl, keys, num_kv_heads, window_chunks):
    """A slot for every token: duplicates too, since each key of a chunk seeds."""
    inputs = make_inputs(2, 23, G=num_kv_heads, keys=keys)
    config = make_config(23, 4, growth="immediate", window_chunks=window_chunks)
    o, state = ovq_attention(*inputs, dictionary=config, impl=impl)
    assert_near(o, full_attention(*inputs), 1e-13)
    assert state.num_active.tolist() == [20 - 4 * window_chunks] * 2


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_window_as_long_as_the_sequence_is_full_attention_without_a_slot(impl):
    """The chunk that would be absorbed first leaves with the token after ``W + C - 1``."""
    config, inputs = make_config(2, 4, window_chunks=5), make_inputs(2, 23)
    o, state, slots = run(inputs, config, impl)
    assert_near(o, full_attention(*inputs), 1e-13)
    assert not state.counts.any()
    assert not state.num_active.any()
    assert (slots.tokens == -1).all()
    _, state, slots = run(make_inputs(2, 1, seed=5), config, impl, state)
    assert state.num_absorbed.tolist() == state.counts.sum(-1)[:, 0].tolist() == [4, 4]
    assert (slots.tail[:, :4] >= 0).all()
    assert (slots.tail[:, 4:] == -1).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_window_by_hand(impl):
    """N = 5, C = W = 2, beta = log 2, growth 1, 2: chunk 1 is absorbed once chunk 2 is full.

    Tokens 0 to 3 see no slot: o_3, q = 0: the mean of 6, 2, 7, -2. After token 3, t' = 2: (1, 0)
    seeds slot 0, (0, 1) joins it: D_k[0] = (1/2, 1/2), D_v[0] = 4, c = 2.
    o_4, q = (2, 0): 2 * 2^1 on 4, 2^2 on 7, 2^-2 on -2, itself 2^2 on 1: 47.5 / 12.25.
    After token 5, t' = 4: 20/9 -> 2 slots; (1, 1) has 1, (-1, 1) has 0 and seeds slot 1.
    o_6, q = 0: 3 on 5, 1 on -2, and the window 1, 4, then itself 3: 21 / 7.
    """
    q = points((0, 0), (0, 0), (0, 0), (0, 0), (2, 0), (0, 0), (0, 0))
    k = points((1, 0), (0, 1), (1, 1), (-1, 1), (1, 5), (-1, -1), (1, 1))
    config = make_config(5, 2, window_chunks=1)
    o, state, slots = run((q, k, column(6, 2, 7, -2, 1, 4, 3), LOG_2), config, impl)
    assert_near(o, column(6, 4, 5, 13 / 4, 47.5 / 12.25, 18 / 6, 21 / 7), 1e-14)
    assert slots.tokens.flatten().tolist() == [0, 0, 0, 1, -1, -1, -1]
    assert state.counts.tolist() == [[[3, 1, 0, 0, 0]]]
    assert [int(x) for x in (state.num_active, state.num_absorbed, state.tail_length)] == [2, 4, 3]
    assert state.tail_values.flatten().tolist() == [1, 4, 3, 0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_directions_by_hand(impl):
    """C = 2, growth 1, 2, 2 slots. Chunk 1: (4, 0), (4, 0) in slot 0. Chunk 2: (0, 1) has 0 and
    seeds slot 1; (4, 0) has 4 and joins slot 0. Chunk 3: (1, 2) has 1 with slot 0's direction and 2
    with slot 1's, so slot 1 (by the means 4 and 2: slot 0), and so has (2, 3).
    The query (1, 0) of token 2 has product 4 with slot 0: the mean is read as it is."""
    k = points((4, 0), (4, 0), (0, 1), (4, 0), (1, 2), (2, 3))
    q = points(*[(1, 0)] * 6)
    config = make_config(5, 2, centroid="direction")
    o, state, slots = run((q, k, column(2, 4, 0, 6, 1, 1), LOG_2), config, impl)
    assert slots.tokens.flatten().tolist() == [0, 0, 1, 0, 1, 1]
    assert_near(o[0, 2], column(2 * 16 * 3 / (2 * 16 + 1))[0, 0], 1e-14)
    means = torch.tensor([[4, 0], [1, 2]], dtype=torch.float64)
    assert_near(state.key_means[0, 0, :2], means, 1e-14, "means stay unscaled")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_beta_as_a_number_is_the_same_for_every_head(impl):
    inputs = make_inputs()
    same = inputs._replace(beta=torch.full((4,), 2.5, dtype=torch.float64))
    o, _, _ = run(inputs._replace(beta=2.5), make_config(), impl)
    assert_near(o, run(same, make_config(), impl)[0], 1e-15)
