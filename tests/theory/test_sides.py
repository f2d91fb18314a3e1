"""Each side of a statement comes from a definition of its own: to break one leaves the other.

Where a statement holds always, no input tells a side from a copy of the other.
"""

import importlib

import pytest
import torch

import ovq.theory
from ovq.theory import GaussianMixture

COUNTS, SLOTS, BETA = torch.tensor([1, 4, 2]), torch.tensor([0, 1, 1, 2, 2, 2]), 2.0
WEIGHTS, GRID = torch.tensor([0.5, 0.2, 0.3]).double(), torch.linspace(-9, 9, 101).double()


def pair_mixture(normal):
    """Over keys and values of one dimension."""
    ones = torch.ones(3, 1, 1).double()
    return GaussianMixture(
        weights=WEIGHTS, key_means=normal(3, 1), value_means=normal(3, 1), key_covariances=ones,
        value_key_covariances=0.5 * ones, value_covariances=ones,
    )  # fmt: skip


# Of each statement: its module, the definition that its left side alone calls, and its arguments.
STATEMENTS = {
    "softmax_attention_is_kernel_regression": (
        "kernel_regression", "softmax_attention",
        lambda normal: (normal(4, 2), normal(6, 2), normal(6, 2), BETA),
    ),
    "softmax_attention_is_weighted_kernel_regression": (
        "kernel_regression", "softmax_attention",
        lambda normal: (normal(4, 2), normal(6, 2), normal(6, 2), BETA),
    ),
    "conditional_mean_is_ratio_of_integrals": (
        "gaussian_mixture_regression", "conditional_mean",
        lambda normal: (pair_mixture(normal), normal(4, 1), GRID),
    ),
    "dictionary_read_is_conditional_mean": (
        "dictionary_read", "dictionary_read",
        lambda normal: (normal(4, 2), normal(3, 2), normal(3, 2), COUNTS, BETA),
    ),
    "norm_corrected_read_is_conditional_mean": (
        "dictionary_read", "norm_corrected_read",
        lambda normal: (normal(4, 2), normal(3, 2), normal(3, 2), COUNTS, BETA),
    ),
    "nearest_has_largest_product": (
        "running_means", "nearest_centroids", lambda normal: (normal(6, 2), normal(3, 2)),
    ),
    "chunked_means_are_batch_means": (
        "running_means", "running_means_step", lambda normal: (normal(6, 2), SLOTS, 3, [2, 4]),
    ),
    "em_step_is_newton_step": (
        "expectation_maximization", "em_step",
        lambda normal: (normal(3, 2), WEIGHTS, normal(6, 2), BETA),
    ),
    "em_step_is_newton_step_of_surrogate": (
        "expectation_maximization", "em_step",
        lambda normal: (normal(3, 2), WEIGHTS, normal(6, 2), BETA),
    ),
    "surrogate_gradient_is_likelihood_gradient": (
        "expectation_maximization", "surrogate",
        lambda normal: (normal(3, 2), WEIGHTS, normal(6, 2), BETA),
    ),
    "likelihood_hessian_is_complete_minus_missing": (
        "expectation_maximization", "negative_log_likelihood",
        lambda normal: (normal(3, 2), WEIGHTS, normal(6, 2), BETA),
    ),
    "kmeans_step_is_newton_step": (
        "hard_assignment", "batch_means", lambda normal: (0.1 * normal(2, 2), normal(9, 2)),
    ),
    "running_means_step_is_newton_step": (
        "hard_assignment", "running_means_step",
        lambda normal: (normal(6, 2), SLOTS, normal(6, 2), SLOTS, 3),
    ),
    "running_means_step_is_gradient_step": (
        "hard_assignment", "running_means_step",
        lambda normal: (normal(3, 2), COUNTS, normal(6, 2), SLOTS),
    ),
    "dictionary_read_is_softmax_attention": (
        "merged_keys", "dictionary_read",
        lambda normal: (normal(4, 2), normal(6, 2), normal(6, 2), SLOTS, 3, BETA),
    ),
    "exact_weight_is_above_merged_weight": (
        "merged_keys", "exact_log_weight", lambda normal: (normal(4, 2), normal(6, 2), BETA),
    ),
    "exact_weight_is_second_order_weight": (
        "merged_keys", "exact_log_weight", lambda normal: (normal(4, 2), normal(6, 2), BETA),
    ),
    "trace_of_covariance_is_one_minus_squared_norm": (
        "merged_keys", "key_covariance", lambda normal: (normal(6, 2),),
    ),
}  # fmt: skip


def broken(definition):
    """The definition with another result: squares added, which no Newton step passes over."""

    def other(*arguments, **options):
        result = definition(*arguments, **options)
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = first + first.square()
        return (first, *rest) if rest else first

    return other


def test_every_statement_is_here():
    named = {name for name in ovq.theory.__all__ if "_is_" in name or "_are_" in name}
    assert set(STATEMENTS) == named | {"nearest_has_largest_product"}


@pytest.mark.parametrize("name", STATEMENTS)
def test_the_left_side_is_of_a_definition_that_the_right_does_not_know(name, normal, monkeypatch):
    module, definition, arguments_of = STATEMENTS[name]
    module = importlib.import_module(f"ovq.theory.{module}")
    statement, arguments = getattr(module, name), arguments_of(normal)
    whole = statement(*arguments)
    monkeypatch.setattr(module, definition, broken(getattr(module, definition)))
    sides = statement(*arguments)
    assert torch.equal(sides.right, whole.right)
    assert (sides.left - whole.left).abs().max() > 1e-3
