"""With hard assignments, k-means and running means are Newton steps without conditions.

Gradients and Hessians come from autograd on the losses, never from the updates they are compared
with.
"""

from functools import partial

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ovq.theory.kernel_regression import squared_distances
from ovq.theory.newton import newton_step
from ovq.theory.running_means import batch_means, nearest_centroids, running_means_step
from ovq.theory.sides import Sides


def quantization_error(
    means: Float64[Tensor, "N K"], points: Float64[Tensor, "P K"]
) -> Float64[Tensor, ""]:
    """The loss of k-means: ``sum_p min_m |x_p - mean_m|^2 / 2``.

    Args:
        means: ``[N, K]``.
        points: ``[P, K]``.

    Returns:
        A number.

    Example:
        >>> means, points = torch.tensor([[0.0], [5.0]]).double(), torch.tensor([[2.0]]).double()
        >>> quantization_error(means, points).item()
        2.0
    """
    return squared_distances(points, means).min(-1).values.sum() / 2


def kmeans_step_is_newton_step(
    means: Float64[Tensor, "N K"], points: Float64[Tensor, "P K"]
) -> Sides:
    """With hard assignments EM *is* Newton: a step of k-means, on the quantization error.

    Holds for any points and means without ties, however close, because the assignment is locally
    constant and the error locally quadratic. This is OVQ's first step: with no points counted yet,
    the running means are the means of the chunk's members.

    Args:
        means: ``[N, K]``; each is the nearest to some point.
        points: ``[P, K]``.

    Returns:
        The means of the members on the left, the Newton step on the right, ``[N, K]``.

    Raises:
        ValueError: a mean that no point is nearest to.

    Example:
        >>> means = torch.tensor([[0.0], [1.0]]).double()
        >>> points = torch.tensor([[0.4], [0.6]]).double()
        >>> kmeans_step_is_newton_step(means, points).gap < 1e-12
        True

    Source: Bottou and Bengio 1994, "Convergence Properties of the K-Means Algorithms".
    """
    members_mean, _ = batch_means(points, nearest_centroids(points, means), len(means))
    return Sides(
        left=members_mean, right=newton_step(partial(quantization_error, points=points), means)
    )


def assigned_error(
    means: Float64[Tensor, "N K"], points: Float64[Tensor, "P K"], slots: Int[Tensor, " P"]
) -> Float64[Tensor, ""]:
    """``sum_p |x_p - mean_{slot of p}|^2 / 2``: quadratic, its Hessian the counts.

    Args:
        means: ``[N, K]``.
        points: ``[P, K]``.
        slots: the slot of each point, ``[P]``.

    Returns:
        A number.

    Example:
        >>> means, points = torch.tensor([[0.0], [5.0]]).double(), torch.tensor([[2.0]]).double()
        >>> assigned_error(means, points, torch.tensor([1])).item()
        4.5
    """
    return (points - means[slots]).square().sum() / 2


def running_means_step_is_newton_step(
    past: Float64[Tensor, "R K"],
    past_slots: Int[Tensor, " R"],
    chunk: Float64[Tensor, "C K"],
    slots: Int[Tensor, " C"],
    num_slots: int,
    *,
    step: float | None = None,
) -> Sides:
    """A running-means step is Newton on the error of all points so far, **at the rate 1/c**.

    The chunk moves the means of the past points; the loss is the past and the chunk's
    :func:`assigned_error`, its Hessian the counts after the chunk.

    Args:
        past: the points counted so far, ``[R, K]``.
        past_slots: their slots ``[R]``; each slot has points.
        chunk: the points that join, ``[C, K]``.
        slots: their slots ``[C]``.
        num_slots: ``N``.
        step: ``None`` for the rate ``1 / c``; a constant step is not Newton's.

    Returns:
        The running means after the chunk on the left, the Newton step on the right, ``[N, K]``.

    Raises:
        ValueError: a slot without past points.

    Example:
        >>> past, chunk = torch.randn(2, 4, 3, dtype=torch.float64)
        >>> slots = torch.tensor([0, 1, 1, 1])
        >>> running_means_step_is_newton_step(past, slots, chunk, slots, 2).gap < 1e-12
        True

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922) for the claim; the loss is part
    of this reconstruction.
    """
    means, counts = batch_means(past, past_slots, num_slots)
    points, joined = torch.cat([past, chunk]), torch.cat([past_slots, slots])
    loss = partial(assigned_error, points=points, slots=joined)
    return Sides(
        left=running_means_step(means, counts, chunk, slots, step=step)[0],
        right=newton_step(loss, means),
    )


def running_means_step_is_gradient_step(
    means: Float64[Tensor, "N K"],
    counts: Int[Tensor, " N"],
    chunk: Float64[Tensor, "C K"],
    slots: Int[Tensor, " C"],
    *,
    step: float | None = None,
) -> Sides:
    """It is also a gradient step on the chunk's own error, each slot at its rate ``1 / c'``.

    The past is needed for the step size alone: at its means its own gradient is 0.

    Args:
        means: ``[N, K]``.
        counts: points that joined before, ``[N]``.
        chunk: the points that join, ``[C, K]``.
        slots: their slots ``[C]``.
        step: ``None`` for the rate ``1 / c'``, with ``c'`` the counts after the chunk.

    Returns:
        The running means after the chunk on the left, the gradient step on the right, ``[N, K]``.

    Example:
        >>> means, chunk = torch.randn(2, 4, 3, dtype=torch.float64)
        >>> counts, slots = torch.tensor([1, 5, 2, 9]), torch.tensor([1, 1, 3, 0])
        >>> running_means_step_is_gradient_step(means, counts, chunk, slots).gap < 1e-12
        True

    Source: Bottou and Bengio 1994, "Convergence Properties of the K-Means Algorithms".
    """
    moved, grown = running_means_step(means, counts, chunk, slots, step=step)
    gradient = torch.func.grad(partial(assigned_error, points=chunk, slots=slots))(means)
    return Sides(left=moved, right=means - gradient / grown.clamp_min(1)[:, None])
