"""In which sense an EM step for the means of a mixture is a Newton step.

The mixture has fixed weights and covariance ``I / beta``. Gradients and Hessians come from autograd
on the losses, never from the formulas they are compared with.
"""

from functools import partial

import torch
from jaxtyping import Float64
from torch import Tensor

from ovq.theory.mixture_likelihood import negative_log_likelihood, responsibilities, surrogate
from ovq.theory.newton import gradient_and_hessian, newton_step
from ovq.theory.sides import Sides


def em_step(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Float64[Tensor, "N K"]:
    """One batch EM step for the means: ``sum_p r_pm x_p / sum_p r_pm``.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1; not updated.
        points: ``[P, K]``.
        beta: inverse variance, above 0; not updated.

    Returns:
        The new means ``[N, K]``.

    Raises:
        ValueError: a mean that is responsible for no point, its share of each below what float64
            resolves.

    Example:
        >>> points, one = torch.tensor([[1.0], [3.0]]).double(), torch.ones(1).double()
        >>> em_step(torch.zeros(1, 1).double(), one, points, 8.0).tolist()
        [[2.0]]
    """
    r = responsibilities(means, weights, points, beta)
    shares = r.sum(0)
    if (shares == 0).any():
        raise ValueError(
            f"means must each be responsible for some point, got sums of {shares.tolist()}"
        )
    return r.mT @ points / shares[:, None]


def em_step_is_newton_step(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Sides:
    """EM is Newton on the negative log-likelihood, **if the responsibilities are hard**.

    Hard: every ``r_pm`` is 0 or 1, so that no point is between two means. Otherwise the Hessian has
    a second part (:func:`likelihood_hessian_is_complete_minus_missing`) that EM leaves out.

    Args:
        means: ``[N, K]``; each has points.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        The EM step on the left, the Newton step on the right, ``[N, K]``.

    Example:
        >>> means = torch.tensor([[-9.0], [9.0]]).double()
        >>> weights = torch.full((2,), 0.5, dtype=torch.float64)
        >>> points = torch.tensor([[-9.5], [8.0], [10.5]]).double()
        >>> em_step_is_newton_step(means, weights, points, 2.0).gap < 1e-12
        True

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922) for the claim; the condition is
    part of this reconstruction.
    """
    loss = partial(negative_log_likelihood, weights=weights, points=points, beta=beta)
    return Sides(left=em_step(means, weights, points, beta), right=newton_step(loss, means))


def em_step_is_newton_step_of_surrogate(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Sides:
    """EM is Newton on its own surrogate, always: the surrogate is quadratic in the means.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        The EM step on the left, the Newton step on the right, ``[N, K]``.

    Example:
        >>> means, points = torch.randn(2, 5, 3, dtype=torch.float64)
        >>> weights = torch.full((5,), 0.2, dtype=torch.float64)
        >>> em_step_is_newton_step_of_surrogate(means, weights, points, 1.0).gap < 1e-10
        True
    """
    fixed = responsibilities(means, weights, points, beta)
    loss = partial(surrogate, weights=weights, points=points, beta=beta, fixed=fixed)
    return Sides(left=em_step(means, weights, points, beta), right=newton_step(loss, means))


def surrogate_gradient_is_likelihood_gradient(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
    at: Float64[Tensor, "N K"] | None = None,
) -> Sides:
    """Surrogate and likelihood have one gradient **where the responsibilities were taken**.

    Args:
        means: where the responsibilities are taken, ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.
        at: where the gradients are taken; ``None`` for ``means``. Elsewhere they differ.

    Returns:
        The surrogate's gradient on the left, the likelihood's on the right, ``[N, K]``.

    Example:
        >>> means, points = torch.randn(2, 5, 3, dtype=torch.float64)
        >>> weights = torch.full((5,), 0.2, dtype=torch.float64)
        >>> surrogate_gradient_is_likelihood_gradient(means, weights, points, 1.0).gap < 1e-12
        True

    Source: Fisher's identity, in Louis 1982, "Finding the Observed Information Matrix when Using
    the EM Algorithm".
    """
    at = means if at is None else at
    fixed = responsibilities(means, weights, points, beta)
    of_surrogate = partial(surrogate, weights=weights, points=points, beta=beta, fixed=fixed)
    of_points = partial(negative_log_likelihood, weights=weights, points=points, beta=beta)
    return Sides(left=torch.func.grad(of_surrogate)(at), right=torch.func.grad(of_points)(at))


def likelihood_hessian_is_complete_minus_missing(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Sides:
    """What EM leaves out of the Hessian: the covariance of the points' scores over components.

    ``H = beta diag(sum_p r_pm) - beta^2 sum_p (delta_mn r_pm - r_pm r_pn) d_pm d_pn^T`` with
    ``d_pm = x_p - mean_m``. The first part is the surrogate's Hessian; the second is 0 if and only
    if no point is shared (but by means that it lies on).

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        The Hessian of the negative log-likelihood by autograd on the left, the Hessian of the
        surrogate by autograd less the second part on the right, ``[N K, N K]``.

    Example:
        >>> means, points = torch.randn(2, 5, 3, dtype=torch.float64)
        >>> weights = torch.full((5,), 0.2, dtype=torch.float64)
        >>> likelihood_hessian_is_complete_minus_missing(means, weights, points, 1.0).gap < 1e-10
        True

    Source: Louis 1982, "Finding the Observed Information Matrix when Using the EM Algorithm".
    """
    r = responsibilities(means, weights, points, beta)
    of_points = partial(negative_log_likelihood, weights=weights, points=points, beta=beta)
    of_surrogate = partial(surrogate, weights=weights, points=points, beta=beta, fixed=r)
    shared = torch.diag_embed(r) - r[:, :, None] * r[:, None]  # [P, N, N]
    offsets = points[:, None] - means  # [P, N, K]
    missing = beta**2 * torch.einsum("pmn,pmk,pnl->mknl", shared, offsets, offsets)
    complete = gradient_and_hessian(of_surrogate, means)[1]
    return Sides(
        left=gradient_and_hessian(of_points, means)[1],
        right=complete - missing.reshape(complete.shape),
    )
