"""The conditional mean of a mixture against the integral of its own density."""

from dataclasses import replace

import pytest
import torch

from ovq.theory import (
    GaussianMixture,
    conditional_mean,
    conditional_mean_is_ratio_of_integrals,
    joint_density,
)

GRID = torch.linspace(-25, 25, 2001, dtype=torch.float64)


def mixture_of(normal, num: int, key_dim: int, value_dim: int) -> GaussianMixture:
    """Random weights, means and full covariances, every key correlated with every value."""
    dim = key_dim + value_dim
    factors = normal(num, dim, dim)
    covariances = factors @ factors.mT / dim + 0.3 * torch.eye(dim).double()
    return GaussianMixture(
        weights=normal(num).softmax(-1),
        key_means=normal(num, key_dim),
        value_means=3 * normal(num, value_dim),
        key_covariances=covariances[:, :key_dim, :key_dim],
        value_key_covariances=covariances[:, key_dim:, :key_dim],
        value_covariances=covariances[:, key_dim:, key_dim:],
    )


def test_one_component_by_hand():
    """Means (1, 10), S_kk = 4, S_vk = 2: at q = 3 the mean is 10 + 2/4 * 2 = 11."""
    at = torch.tensor
    mixture = GaussianMixture(
        weights=at([1.0]).double(),
        key_means=at([[1.0]]).double(),
        value_means=at([[10.0]]).double(),
        key_covariances=at([[[4.0]]]).double(),
        value_key_covariances=at([[[2.0]]]).double(),
        value_covariances=at([[[5.0]]]).double(),
    )
    assert conditional_mean(mixture, at([[3.0]]).double()).item() == pytest.approx(11.0)
    # At the means the density is 1 / (2 pi sqrt(det)), det = 4 * 5 - 2 * 2 = 16.
    density = joint_density(mixture, at([[1.0]]).double(), at([[10.0]]).double())
    assert density.item() == pytest.approx(1 / (8 * torch.pi))


def test_the_density_integrates_to_one(normal):
    mixture = mixture_of(normal, 3, 1, 1)
    grid = torch.linspace(-20, 20, 401, dtype=torch.float64)
    keys, values = torch.meshgrid(grid, grid, indexing="ij")
    density = joint_density(mixture, keys.reshape(-1, 1), values.reshape(-1, 1))
    total = density.sum() * (grid[1] - grid[0]) ** 2
    assert total.item() == pytest.approx(1.0, abs=1e-10)


@pytest.mark.parametrize("key_dim", [1, 3])
def test_the_formula_is_the_integral(normal, key_dim):
    mixture = mixture_of(normal, 4, key_dim, 1)
    q = 2 * normal(7, key_dim)
    assert conditional_mean_is_ratio_of_integrals(mixture, q, GRID).gap < 1e-11


def test_it_is_not_without_the_correlation_of_key_and_value(normal):
    mixture = mixture_of(normal, 4, 1, 1)
    uncorrelated = replace(mixture, value_key_covariances=0 * mixture.value_key_covariances)
    q = 2 * normal(7, 1)
    integral = conditional_mean_is_ratio_of_integrals(mixture, q, GRID).right
    assert (conditional_mean(uncorrelated, q) - integral).abs().max() > 0.5


def test_vector_values_are_conditioned_coordinate_by_coordinate(normal):
    mixture, q = mixture_of(normal, 4, 2, 3), normal(5, 2)
    for axis in range(3):
        of_axis = replace(
            mixture,
            value_means=mixture.value_means[:, axis, None],
            value_key_covariances=mixture.value_key_covariances[:, axis, None],
            value_covariances=mixture.value_covariances[:, axis, None, axis, None],
        )
        integral = conditional_mean_is_ratio_of_integrals(of_axis, q, GRID).right
        torch.testing.assert_close(conditional_mean(mixture, q)[:, axis, None], integral)


def test_vector_values_cannot_be_integrated_over(normal):
    with pytest.raises(ValueError, match=r"values of one dimension .* got 2"):
        conditional_mean_is_ratio_of_integrals(mixture_of(normal, 2, 1, 2), normal(1, 1), GRID)
