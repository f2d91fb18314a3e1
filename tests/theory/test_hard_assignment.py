"""k-means and running means against Newton with the whole Hessian by autograd."""

import pytest
import torch

from ovq.theory import (
    assigned_error,
    batch_means,
    em_step_is_newton_step,
    gradient_and_hessian,
    kmeans_step_is_newton_step,
    quantization_error,
    running_means_step,
    running_means_step_is_gradient_step,
    running_means_step_is_newton_step,
)

SLOTS, PAST_SLOTS = torch.tensor([0, 2, 2, 0, 0, 2]), torch.arange(9) % 3  # slot 1: past alone


def test_errors_by_hand():
    means, points = torch.tensor([[0.0], [5.0]]).double(), torch.tensor([[1.0], [2.0]]).double()
    assert quantization_error(means, points).item() == (1 + 4) / 2
    assert assigned_error(means, points, torch.tensor([1, 0])).item() == (16 + 4) / 2


def test_a_kmeans_step_is_newton_where_soft_em_is_not(normal):
    """One cloud of points, three means inside it: as far from separated as can be."""
    means, points = 0.3 * normal(3, 2), normal(40, 2)
    assert kmeans_step_is_newton_step(means, points).gap < 1e-12
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert em_step_is_newton_step(means, third, points, 1.0).gap > 0.1


def test_at_a_tie_there_is_no_gradient():
    """A point between two means at one distance: moved either way, one of them loses or wins it."""
    points = torch.zeros(1, 1).double()

    def error(first: float) -> float:
        return quantization_error(
            torch.tensor([[first], [1.0]], dtype=torch.float64), points
        ).item()

    step = 1e-6
    assert (error(-1 - step) - error(-1)) / step == pytest.approx(0, abs=1e-5)
    assert (error(-1 + step) - error(-1)) / step == pytest.approx(-1, abs=1e-5)


def test_an_empty_slot_has_no_newton_step(normal):
    means = torch.cat([normal(2, 2), torch.full((1, 2), 1e3).double()])
    with pytest.raises(ValueError, match="slots must name each of 3 slots"):
        kmeans_step_is_newton_step(means, normal(10, 2))


def test_the_first_step_from_counts_of_zero_is_the_members_mean(normal):
    """With nothing counted yet the initial dictionary only assigns: a batch step of hard EM."""
    start, points, slots = normal(3, 2), normal(9, 2), torch.arange(9) % 3
    moved, counts = running_means_step(start, torch.zeros(3, dtype=torch.int64), points, slots)
    torch.testing.assert_close(moved, batch_means(points, slots, 3)[0])
    assert counts.tolist() == [3, 3, 3]


def test_a_running_means_step_is_newton_on_all_points_so_far(normal):
    past, chunk = normal(9, 2), normal(6, 2)
    sides = running_means_step_is_newton_step(past, PAST_SLOTS, chunk, SLOTS, 3)
    assert sides.gap < 1e-12
    before, _ = batch_means(past, PAST_SLOTS, 3)
    moved = (sides.left - before).norm(dim=-1)
    assert moved[1] < 1e-15  # sparse: a slot without new points is at its minimum
    assert moved[[0, 2]].min() > 0.1


def test_the_hessian_of_that_error_is_the_counts(normal):
    points, slots = normal(9, 2), torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 2])
    loss = lambda means: assigned_error(means, points, slots)  # noqa: E731
    _, hessian = gradient_and_hessian(loss, normal(3, 2))
    torch.testing.assert_close(hessian, torch.tensor([1.0, 1, 2, 2, 6, 6]).double().diag())


@pytest.mark.parametrize("step", [0.1, 0.9])
def test_a_constant_rate_is_no_newton_step(normal, step):
    past, chunk = normal(9, 2), normal(6, 2)
    sides = running_means_step_is_newton_step(past, PAST_SLOTS, chunk, SLOTS, 3, step=step)
    assert sides.gap > 0.1


def test_it_is_a_gradient_step_at_rate_one_over_count(normal):
    means, chunk, counts = normal(3, 2), normal(6, 2), torch.tensor([4, 9, 1])
    assert running_means_step_is_gradient_step(means, counts, chunk, SLOTS).gap < 1e-12
    assert running_means_step_is_gradient_step(means, counts, chunk, SLOTS, step=0.9).gap > 0.1
    never = torch.tensor([4, 0, 1])  # slot 1 has no points, of the past or of the chunk
    assert running_means_step_is_gradient_step(means, never, chunk, SLOTS).gap < 1e-12
