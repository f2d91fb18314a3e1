"""Hostile numbers: zero, huge and identical keys, any beta: finite, and equal where they can be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    assert_all_near,
    generator,
    gradients,
    make_config,
    make_inputs,
    real_tensors,
    run,
    unit_vectors,
    zipf_vectors,
)

C = 4


def scaled_inputs(num_tokens: int, key_norms, query_norm: float, beta: float, keys, seed: int):
    """Keys of the given norms, mixed."""
    inputs = make_inputs(2, num_tokens, keys=keys, seed=seed)
    choice = torch.randint(len(key_norms), (2, num_tokens, 2, 1), generator=generator(seed))
    norms = torch.tensor(key_norms, dtype=torch.float64)[choice]
    return inputs._replace(
        q=query_norm * inputs.q, k=norms * inputs.k, beta=torch.full_like(inputs.beta, beta)
    )


def identical(*shape: int, seed: int) -> torch.Tensor:
    """One key for all."""
    return unit_vectors(shape[-1], seed=seed).expand(shape).clone()


any_keys = st.sampled_from([unit_vectors, zipf_vectors, identical])
any_length = st.integers(1, 5 * C + 3)
any_variant = st.sampled_from(sorted(VARIANTS))


def results(inputs, config, impl: str, slots=None):
    """Output, state, gradients and slots."""
    leaves = inputs.leaves()
    o, state, slots = run(leaves, config, impl, slots=slots)
    tensors = real_tensors(o, state)
    return [x.detach() for x in tensors], gradients(tensors, leaves), slots


@given(
    num_tokens=any_length,
    key_norms=st.lists(st.sampled_from([0.0, 1e-4, 1.0, 50.0]), min_size=1, max_size=3),
    beta=st.sampled_from([-2.0, 0.0, 1e-3, 2.0]),
    keys=any_keys,
    variant=any_variant,
    seed=st.integers(0, 9),
)
def test_implementations_agree_while_logits_are_moderate(
    num_tokens, key_norms, beta, keys, variant, seed
):
    """On fed slots, |beta| |q| |k| up to 100."""
    config = make_config(5, C, **VARIANTS[variant])
    inputs = scaled_inputs(num_tokens, key_norms, 1.0, beta, keys, seed)
    tensors, grads, slots = results(inputs, config, "reference")
    for impl in IMPLEMENTATIONS[1:]:
        found, found_grads, _ = results(inputs, config, impl, slots)
        assert_all_near(found, tensors, 1e-10, "o, state:")
        assert_all_near(found_grads, grads, 1e-8, "gradient of q, k, v, beta:")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@given(
    num_tokens=any_length,
    key_norms=st.lists(st.sampled_from([0.0, 1.0, 1e4]), min_size=1, max_size=3),
    query_norm=st.sampled_from([0.0, 1.0, 1e4]),
    beta=st.sampled_from([-1e3, 0.0, 1e3]),
    keys=any_keys,
    variant=any_variant,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_everything_is_finite(impl, num_tokens, key_norms, query_norm, beta, keys, variant, dtype):
    config = make_config(5, C, **VARIANTS[variant])
    inputs = scaled_inputs(num_tokens, key_norms, query_norm, beta, keys, 3).to(dtype)
    tensors, grads, _ = results(inputs, config, impl)
    assert all(x.isfinite().all() for x in tensors), "output or state"
    assert all(x.isfinite().all() for x in grads), "gradient"
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    assert float(tensors[0].abs().max()) <= float(inputs.v.abs().max()) * 1.01  # a weighted mean


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_beta_zero_is_the_mean_of_all_values_so_far(impl):
    inputs = make_inputs(2, 19)
    o, _, _ = run(inputs._replace(beta=0.0), make_config(5, C), impl)
    mean = inputs.v.cumsum(1) / torch.arange(1, 20)[:, None, None]
    assert_all_near([o], [mean.repeat_interleave(2, dim=2)], 1e-13, "running mean")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_queries_of_norm_zero_and_keys_of_norm_zero_are_the_same_mean(impl):
    inputs = make_inputs(2, 19)
    mean = (inputs.v.cumsum(1) / torch.arange(1, 20)[:, None, None]).repeat_interleave(2, dim=2)
    for name in "qk":
        zero = {name: torch.zeros_like(getattr(inputs, name))}
        o, _, _ = run(inputs._replace(**zero), make_config(5, C, centroid="unit"), impl)
        assert_all_near([o], [mean], 1e-13, f"{name} = 0")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_huge_beta_picks_the_nearest_key(impl):
    """Each query is a copy of the token's own key: the output is its own value."""
    inputs = make_inputs(1, 3 * C + 3, H=1, G=1, K=16)
    pointing = inputs._replace(q=inputs.k, beta=1e4)
    o, _, _ = run(pointing, make_config(5, C), impl)
    assert_all_near([o], [inputs.v], 1e-12, "own value")
