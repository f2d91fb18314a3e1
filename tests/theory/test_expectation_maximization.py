"""EM against Newton with the whole Hessian by autograd: hard, soft, and in between."""

from functools import partial

import pytest
import torch

from ovq.theory import (
    em_step,
    em_step_is_newton_step,
    em_step_is_newton_step_of_surrogate,
    gradient_and_hessian,
    likelihood_hessian_is_complete_minus_missing,
    negative_log_likelihood,
    newton_step,
    responsibilities,
    surrogate_gradient_is_likelihood_gradient,
)

WEIGHTS = torch.tensor([0.5, 0.2, 0.3]).double()


@pytest.fixture
def clusters(normal):
    """Three clusters of ten points, a given distance apart, and means a little off them."""

    def draw(distance: float):
        centers = distance * torch.eye(3).double()
        points = (centers[:, None] + 0.5 * normal(3, 10, 3)).flatten(0, 1)
        return centers + 0.3 * normal(3, 3), points

    return draw


def test_the_likelihood_is_the_distributions(clusters):
    means, points = clusters(1.0)
    normals = torch.distributions.MultivariateNormal(means, torch.eye(3).double() / 4)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(WEIGHTS), normals
    )
    ours = negative_log_likelihood(means, WEIGHTS, points, 4.0)
    torch.testing.assert_close(ours, -mixture.log_prob(points).sum())


def test_an_em_step_by_hand():
    """Means 0 and 1 at beta = 2 log 2: from 0, |x|^2 = 0 and 1 weigh 1 and 1/2."""
    means, points = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    beta, half = 2 * torch.log(torch.tensor(2.0)).item(), torch.tensor([0.5, 0.5]).double()
    # r = [[2/3, 1/3], [1/3, 2/3]]: the means become 1/3 and 2/3.
    expected = torch.tensor([[1 / 3], [2 / 3]]).double()
    torch.testing.assert_close(em_step(means, half, points, beta), expected, atol=1e-7, rtol=0)


def test_a_mean_that_is_responsible_for_nothing_has_no_step(clusters):
    means, points = clusters(1.0)
    far = torch.cat([means[:2], torch.full((1, 3), 1e3).double()])
    with pytest.raises(ValueError, match=r"responsible for some point, got sums of \[.*, 0\.0\]"):
        em_step(far, WEIGHTS, points, 4.0)


def test_hard_responsibilities_make_em_newton(clusters):
    means, points = clusters(30.0)
    r = responsibilities(means, WEIGHTS, points, 4.0)
    assert (r * (1 - r)).max() < 1e-15
    sides = em_step_is_newton_step(means, WEIGHTS, points, 4.0)
    assert sides.gap < 1e-10
    assert (sides.left - means).abs().max() > 0.1  # a step, not a fixed point
    torch.testing.assert_close(sides.left, points.view(3, 10, 3).mean(1))


def test_soft_responsibilities_do_not(clusters):
    means, points = clusters(1.0)
    r = responsibilities(means, WEIGHTS, points, 4.0)
    assert (r * (1 - r)).max() > 0.2
    assert em_step_is_newton_step(means, WEIGHTS, points, 4.0).gap > 0.2


def test_the_gap_closes_as_the_responsibilities_harden(clusters):
    means, points = clusters(3.0)
    betas = (1.0, 2.0, 4.0, 8.0)
    gaps = [em_step_is_newton_step(means, WEIGHTS, points, beta).gap for beta in betas]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.05
    assert gaps[-1] < 1e-6


def test_the_diagonal_blocks_of_the_likelihoods_hessian_do_not_help(clusters):
    """It is the responsibilities that must be held fixed, not the means that must be decoupled."""
    means, points = clusters(1.0)
    loss = partial(negative_log_likelihood, weights=WEIGHTS, points=points, beta=4.0)
    gradient, hessian = gradient_and_hessian(loss, means)
    blocks = hessian * torch.eye(3).double().repeat_interleave(3, 0).repeat_interleave(3, 1)
    step = means - torch.linalg.solve(blocks, gradient).view(3, 3)
    assert (step - em_step(means, WEIGHTS, points, 4.0)).abs().max() > 0.1


@pytest.mark.parametrize("distance", [0.0, 1.0, 30.0])
def test_em_is_newton_on_its_surrogate_always(clusters, distance):
    means, points = clusters(distance)
    assert em_step_is_newton_step_of_surrogate(means, WEIGHTS, points, 4.0).gap < 1e-10


@pytest.mark.parametrize("distance", [0.0, 1.0, 30.0])
def test_surrogate_and_likelihood_have_one_gradient_there(clusters, distance):
    means, points = clusters(distance)
    sides = surrogate_gradient_is_likelihood_gradient(means, WEIGHTS, points, 4.0)
    assert sides.gap < 1e-10
    assert sides.left.abs().max() > 1


def test_and_different_ones_elsewhere(clusters):
    means, points = clusters(1.0)
    elsewhere = means + 0.2
    sides = surrogate_gradient_is_likelihood_gradient(means, WEIGHTS, points, 4.0, elsewhere)
    assert sides.gap > 0.5


def test_what_em_leaves_out_of_the_hessian(clusters, normal):
    means, points = clusters(1.0)
    sides = likelihood_hessian_is_complete_minus_missing(means, WEIGHTS, points, 4.0)
    assert sides.gap < 1e-9
    # The surrogate's Hessian alone: diagonal, beta times the soft counts.
    soft_counts = responsibilities(means, WEIGHTS, points, 4.0).sum(0).repeat_interleave(3)
    assert (sides.left - (4.0 * soft_counts).diag()).abs().max() > 10


def test_where_newton_climbs_em_descends(normal):
    """Two means between two clusters: the likelihood is not convex there, Newton goes uphill."""
    right = 3 + 0.5 * normal(10, 1)
    points = torch.cat([right, -right])
    means, half = torch.tensor([[-0.3], [0.3]]).double(), torch.tensor([0.5, 0.5]).double()
    loss = partial(negative_log_likelihood, weights=half, points=points, beta=0.5)
    assert torch.linalg.eigvalsh(gradient_and_hessian(loss, means)[1]).min() < 0
    assert loss(newton_step(loss, means)) > loss(means) + 0.1
    assert loss(em_step(means, half, points, 0.5)) < loss(means) - 1
