"""Windowed OVQ attention: equal to its oracle, to full attention in the window, under any split."""

import pytest
import torch

from ovq import DictionaryConfig
from ovq.ops.attention import softmax_attention
from ovq.ops.rotary import rotate
from ovq.ops.windowed_ovq import (
    Positions,
    WindowedOVQState,
    windowed_ovq_attention,
    windowed_ovq_by_tokens,
)

POSITIONS = Positions(rope_theta=50.0, distance=11, max_position=17)
DICTIONARIES = {
    "paper": DictionaryConfig(num_centroids=5, chunk_size=3, window_size=6),
    "no window": DictionaryConfig(num_centroids=5, chunk_size=4, seeding="novel"),
    "direction": DictionaryConfig(
        num_centroids=7, chunk_size=2, window_size=2, seeding="novel", centroid="direction"
    ),
    "unit": DictionaryConfig(num_centroids=6, chunk_size=1, growth="immediate", centroid="unit"),
}


def inputs(num_rows: int, num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q with 4 heads, k and v with 2, a bias a head; float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(num_rows, num_tokens, h, d, generator=generator, dtype=torch.float64)
        for h, d in ((4, 6), (2, 6), (2, 3))
    )
    return q, k, v, torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)


def run(q, k, v, bias, state=None, *, dictionary, num_first_tokens=2):
    return windowed_ovq_attention(
        q, k, v, 0.7, bias, state,
        dictionary=dictionary, num_first_tokens=num_first_tokens, positions=POSITIONS,
    )  # fmt: skip


@pytest.fixture(params=DICTIONARIES.values(), ids=DICTIONARIES)
def dictionary(request):
    return request.param


@pytest.mark.parametrize(("num_tokens", "num_first_tokens"), [(1, 4), (3, 0), (29, 3)])
def test_equals_the_oracle(dictionary, num_first_tokens, num_tokens):
    q, k, v, bias = inputs(2, num_tokens)
    o, _ = run(q, k, v, bias, dictionary=dictionary, num_first_tokens=num_first_tokens)
    for row, g in ((0, 0), (1, 1)):
        heads = slice(2 * g, 2 * g + 2)
        expected = windowed_ovq_by_tokens(
            q[row, :, heads], k[row, :, g], v[row, :, g], 0.7, bias[heads],
            dictionary, num_first_tokens, POSITIONS,
        )  # fmt: skip
        torch.testing.assert_close(o[row, :, heads], expected, atol=1e-12, rtol=0)


def test_is_full_attention_until_a_chunk_leaves_the_window():
    q, k, v, bias = inputs(1, 40)
    dictionary = DictionaryConfig(num_centroids=4, chunk_size=8, window_size=16)
    positions = Positions(rope_theta=50.0, distance=11, max_position=100)
    o, _ = windowed_ovq_attention(
        q, k, v, 0.7, bias, dictionary=dictionary, num_first_tokens=2, positions=positions
    )
    places = torch.arange(40)[:, None]
    full, _ = softmax_attention(rotate(q, places, 50.0), rotate(k, places, 50.0), v, scale=0.7)
    exact = 2 + 8 + 16
    torch.testing.assert_close(o[:, :exact], full[:, :exact], atol=1e-12, rtol=0)
    assert (o - full)[:, exact:].abs().amin(dim=(0, 2, 3)).min() > 1e-6


@pytest.mark.parametrize("cuts", [[1], [3, 4, 15], list(range(1, 23))])
def test_any_split_equals_one_call(dictionary, cuts):
    q, k, v, bias = inputs(2, 23)
    whole, after = run(q, k, v, bias, dictionary=dictionary)
    state, outputs = None, []
    for start, stop in zip([0, *cuts], [*cuts, 23], strict=True):
        part = slice(start, stop)
        o, state = run(q[:, part], k[:, part], v[:, part], bias, state, dictionary=dictionary)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(state.first_keys, after.first_keys, atol=0, rtol=0)
    for name, tensor in state.memory.tensors().items():
        torch.testing.assert_close(tensor, after.memory.tensors()[name], atol=1e-12, rtol=0)


def test_rows_of_unlike_lengths_each_equal_their_own_run(dictionary):
    pasts = (0, 1, 2, 9, 3, 1)
    states, expected = [], []
    for row, past in enumerate(pasts):
        q, k, v, bias = inputs(1, past + 8, seed=row)
        o, _ = run(q, k, v, bias, dictionary=dictionary, num_first_tokens=3)
        expected.append(o[:, past:])
        begun = (x[:, :past] for x in (q, k, v))
        states.append(run(*begun, bias, dictionary=dictionary, num_first_tokens=3)[1])
    new = [inputs(1, past + 8, seed=row) for row, past in enumerate(pasts)]
    q, k, v = (
        torch.cat([row[i][:, past:] for row, past in zip(new, pasts, strict=True)])
        for i in range(3)
    )  # fmt: skip
    state = WindowedOVQState.concat(states)
    o, after = run(q, k, v, bias, state, dictionary=dictionary, num_first_tokens=3)
    torch.testing.assert_close(o, torch.cat(expected), atol=1e-12, rtol=0)
    assert after.num_tokens.tolist() == [past + 8 for past in pasts]


def test_without_the_dictionary_it_is_left_out():
    """A bias of minus infinity: a window by blocks and the first tokens alone."""
    q, k, v, _ = inputs(1, 30)
    bias = torch.full((4,), -torch.inf, dtype=torch.float64)
    dictionary = DictionaryConfig(num_centroids=5, chunk_size=3, window_size=6)
    o, _ = run(q, k, v, bias, dictionary=dictionary)
    changed = v.clone()
    changed[:, 2:5] += 10.0  # absorbed by the time of the last chunk
    other, _ = run(q, k, changed, bias, dictionary=dictionary)
    torch.testing.assert_close(o[:, -3:], other[:, -3:], atol=0, rtol=0)
    assert (o - other)[:, 2:11].abs().amin(dim=(0, 2, 3)).min() > 1e-6


def test_gradients_match_finite_differences():
    q, k, v, bias = (x.requires_grad_() for x in inputs(1, 7))
    dictionary = DICTIONARIES["direction"]

    def outputs(*leaves):
        return run(*leaves, dictionary=dictionary, num_first_tokens=1)[0]

    assert torch.autograd.gradcheck(outputs, (q, k, v, bias), atol=1e-6, fast_mode=True)


@pytest.mark.plain
def test_bad_input_raises():
    q, k, v, bias = inputs(1, 5)
    dictionary = DICTIONARIES["paper"]
    _, state = run(q, k, v, bias, dictionary=dictionary)
    other = DICTIONARIES["unit"]
    for call, message in (
        (lambda: run(q[..., :5], k[..., :5], v, bias, dictionary=dictionary), "an even K"),
        (lambda: run(q, k, v, bias[:2], dictionary=dictionary), r"bias must be \[H\] = \[4\]"),
        (lambda: run(q, k[:, :4], v, bias, dictionary=dictionary), "k must share B, T"),
        (lambda: run(q, k, v, bias, state, dictionary=other), "made with the dictionary of this"),
        (
            lambda: run(q, k, v, bias, state, dictionary=dictionary, num_first_tokens=3),
            "3 first tokens for these inputs, got .* and 2",
        ),
        (
            lambda: run(q, k, v, bias, dictionary=dictionary, num_first_tokens=-1),
            "num_first_tokens must be at least 0, got -1",
        ),
        (lambda: Positions(rope_theta=0.0, distance=1, max_position=1), "rope_theta must be above"),
        (lambda: Positions(rope_theta=9.0, distance=-1, max_position=1), "distance must be at"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
