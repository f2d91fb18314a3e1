"""Ways to remember, against plain attention and against their bytes."""

from dataclasses import replace

import pytest
import torch

from ovq import OVQState
from ovq.fidelity import METHODS, Sample, random_keys, relative_error, zipf_keys
from ovq.fidelity.methods import exact, fitted, state_bytes, window_of, windowed
from ovq.ops.attention import softmax_attention

LENGTH = 512


@pytest.fixture(scope="module")
def sample() -> Sample:
    return zipf_keys(LENGTH, seed=0, num_heads=2, head_dim=16)


def grouped(sample: Sample) -> Sample:
    return replace(sample, q=torch.cat([sample.q, sample.q.flip(0)], dim=1))


def second_half(sample: Sample, window_size=None):
    o, _ = softmax_attention(
        *(x[None] for x in (sample.q, sample.k, sample.v)), window_size=window_size,
        scale=sample.beta,
    )  # fmt: skip
    return o[0, LENGTH // 2 :]


@pytest.mark.parametrize("window", [1, 7, 100, 511, 512])
@pytest.mark.parametrize("heads", [lambda sample: sample, grouped])
def test_windows_equal_those_of_the_operator(sample, window, heads):
    found = windowed(heads(sample), window, 0)
    expected = second_half(heads(sample), window)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_exact_is_full_attention(sample):
    torch.testing.assert_close(exact(sample), second_half(sample), atol=2e-6, rtol=1e-5)


def test_first_tokens_stay_in_sight(sample):
    far = replace(sample, v=torch.zeros_like(sample.v))
    far.v[:3] = 1.0
    assert windowed(far, 20, 2).amin() > 0
    assert windowed(far, 20, 0).abs().amax() == 0
    # A window that reaches the first tokens sees them once.
    torch.testing.assert_close(windowed(sample, LENGTH, 4), exact(sample), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("num_bytes", [300_000, 123_457])
@pytest.mark.parametrize("fields", [{"chunk_size": 128}, {"chunk_size": 64, "window_size": 64}])
def test_the_fitted_dictionary_is_the_largest(sample, num_bytes, fields):
    config = fitted(sample, num_bytes, fields)
    assert state_bytes(sample, config) <= num_bytes
    larger = replace(config, num_centroids=config.num_centroids + 1)
    assert state_bytes(sample, larger) > num_bytes
    held = OVQState.empty(1, 2, 16, 16, dictionary=config)
    assert held.num_bytes == state_bytes(sample, config)


def test_bytes_for_no_slot_are_refused(sample):
    with pytest.raises(ValueError, match="num_bytes must hold a slot"):
        fitted(sample, 1000, {"chunk_size": 128})


def test_the_window_takes_the_bytes_it_is_given(sample):
    assert window_of(sample, 10 * 4 * 2 * (16 + 16)) == 10


@pytest.mark.parametrize("name", METHODS)
def test_no_method_is_worse_than_nothing_remembered(sample, name):
    """All see what is near; what is far, and the rest of the error, is the method's own."""
    config = replace(fitted(sample, 10**6, {"chunk_size": 128}), num_centroids=48)
    o = METHODS[name].run(sample, state_bytes(sample, config))
    assert o.shape == (LENGTH // 2, 2, 16)
    assert relative_error(o, exact(sample)) < relative_error(torch.zeros_like(o), exact(sample))


@pytest.mark.parametrize(
    "name", ["ovq, immediate", "random subset", "sliding window", "sliding window, first tokens"]
)
def test_bytes_for_all_tokens_give_full_attention(name):
    sample = random_keys(LENGTH, seed=1, num_heads=2, head_dim=16)
    o = METHODS[name].run(sample, 10**7)
    assert relative_error(o, exact(sample)) < 1e-5


def test_offline_slots_know_what_comes(sample):
    """Better than the paper's rule at the same bytes, and exact with a slot for every token."""
    num_bytes = state_bytes(sample, fitted(sample, 60_000, {"chunk_size": 128}))
    errors = {
        name: relative_error(METHODS[name].run(sample, num_bytes), exact(sample))
        for name in ("ovq, paper", "offline k-means")
    }
    assert errors["offline k-means"] < errors["ovq, paper"]
    enough = OVQState.empty(
        1, 2, 16, 16, dictionary=fitted(sample, 10**6, {"chunk_size": 128}), device="meta"
    )
    assert enough.counts.shape[-1] > LENGTH
    every = replace(fitted(sample, 10**6, {"chunk_size": 128}), num_centroids=LENGTH)
    o = METHODS["offline k-means"].run(sample, state_bytes(sample, every))
    assert relative_error(o, exact(sample)) < 1e-5


def test_the_error_is_relative_and_finite():
    target = torch.tensor([[[3.0, 4.0]]])
    assert relative_error(target, target) == 0
    assert relative_error(torch.zeros_like(target), target) == 1
    assert relative_error(target + torch.tensor([0.0, 2.5]), target) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="finite"):
        relative_error(target * torch.nan, target)
