"""OVQ's read as the conditional mean of an isotropic mixture: equal norms, or a term for them."""

from dataclasses import replace

import pytest
import torch

from ovq import DictionaryConfig
from ovq.ops.ovq_attention.reference import HeadDictionary, predict
from ovq.theory import (
    conditional_mean,
    conditional_mean_is_ratio_of_integrals,
    dictionary_read,
    dictionary_read_is_conditional_mean,
    isotropic_mixture,
    norm_corrected_read_is_conditional_mean,
)

COUNTS = torch.tensor([1, 40, 3, 7, 2, 19])


def test_read_is_the_operators_prediction_before_the_first_key_of_a_chunk(normal, unit):
    """The definition's softmax over the dictionary, with no key of its own chunk to see."""
    q, D_k, D_v = unit(5, 4), unit(6, 4), normal(6, 3)
    operators = predict(
        q[None],
        q.new_zeros(0, 4),
        q.new_zeros(0, 3),
        torch.tensor([8.0]).double(),
        torch.zeros(5, 0).bool(),
        HeadDictionary(D_k, D_v, COUNTS),
        DictionaryConfig(num_centroids=6, chunk_size=4),
    )
    torch.testing.assert_close(dictionary_read(q, D_k, D_v, COUNTS, 8.0), operators[0])


@pytest.mark.parametrize("beta", [0.5, 8.0, 64.0])
@pytest.mark.parametrize("query_norm", [0.1, 1.0, 10.0])
def test_equal_norms_make_the_read_a_conditional_mean(normal, unit, beta, query_norm):
    q, D_k, D_v = query_norm * normal(5, 4), 0.7 * unit(6, 4), normal(6, 3)
    assert dictionary_read_is_conditional_mean(q, D_k, D_v, COUNTS, beta).gap < 1e-11
    assert norm_corrected_read_is_conditional_mean(q, D_k, D_v, COUNTS, beta).gap < 1e-11


def test_unequal_norms_need_the_term(normal, unit):
    """Means of unit keys are shorter the wider they spread: here between 0.3 and 1."""
    q, D_v = unit(5, 4), normal(6, 3)
    D_k = unit(6, 4) * torch.linspace(0.3, 1, 6).double()[:, None]
    assert dictionary_read_is_conditional_mean(q, D_k, D_v, COUNTS, 8.0).gap > 0.5
    assert norm_corrected_read_is_conditional_mean(q, D_k, D_v, COUNTS, 8.0).gap < 1e-11


def test_the_term_is_there_in_the_integral_too(normal, unit):
    q, D_v = unit(5, 4), normal(6, 1)
    D_k = unit(6, 4) * torch.linspace(0.3, 1, 6).double()[:, None]
    integral = conditional_mean_is_ratio_of_integrals(
        isotropic_mixture(D_k, D_v, COUNTS, 8.0),
        q,
        torch.linspace(-15, 15, 601, dtype=torch.float64),
    ).right
    with_term = norm_corrected_read_is_conditional_mean(q, D_k, D_v, COUNTS, 8.0).left
    torch.testing.assert_close(with_term, integral)


def test_correlated_keys_and_values_are_another_read(normal, unit):
    q, D_k, D_v = unit(5, 4), unit(6, 4), normal(6, 3)
    mixture = isotropic_mixture(D_k, D_v, COUNTS, 8.0)
    correlated = replace(mixture, value_key_covariances=0.05 * normal(6, 3, 4))
    read = dictionary_read(q, D_k, D_v, COUNTS, 8.0)
    assert (read - conditional_mean(correlated, q)).abs().max() > 0.3


def test_what_is_no_mixture_raises(unit):
    means = unit(2, 3)
    with pytest.raises(ValueError, match=r"counts must be above 0, got \[3, 0\]"):
        isotropic_mixture(means, means, torch.tensor([3, 0]), 8.0)
    for beta in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"beta must be above 0, got {beta}"):
            isotropic_mixture(means, means, torch.tensor([3, 1]), beta)


def test_its_weights_are_the_slots_shares(unit):
    weights = isotropic_mixture(unit(6, 3), unit(6, 3), COUNTS, 8.0).weights
    torch.testing.assert_close(weights, COUNTS.double() / 72)
