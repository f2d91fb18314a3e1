"""The likelihood of an isotropic Gaussian mixture, and the surrogate that EM minimises."""

import torch
from jaxtyping import Float64
from torch import Tensor

from ovq.theory.kernel_regression import squared_distances


def log_joint(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Float64[Tensor, "P N"]:
    """``log pi_m + log N(x_p | mean_m, I / beta)`` of every point and component.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        ``[P, N]``.

    Example:
        >>> zero, one = torch.zeros(1, 1).double(), torch.ones(1).double()
        >>> log_joint(zero, one, zero, 2 * torch.pi).item()
        0.0
    """
    normalizer = points.shape[-1] / 2 * torch.tensor(beta / (2 * torch.pi)).to(points).log()
    return weights.log() + normalizer - beta / 2 * squared_distances(points, means)


def negative_log_likelihood(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Float64[Tensor, ""]:
    """``-sum_p log sum_m pi_m N(x_p | mean_m, I / beta)``.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        A number.

    Example:
        >>> zero, one = torch.zeros(1, 1).double(), torch.ones(1).double()
        >>> negative_log_likelihood(zero, one, zero + 1, 2 * torch.pi).item() == torch.pi
        True
    """
    return -log_joint(means, weights, points, beta).logsumexp(-1).sum()


def responsibilities(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
) -> Float64[Tensor, "P N"]:
    """The E-step: ``r_pm = p(m | x_p)``, the posterior of the components given each point.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.

    Returns:
        ``[P, N]``; each row sums to 1.

    Example:
        >>> means = torch.tensor([[-1.0], [1.0]]).double()
        >>> weights = torch.full((2,), 0.5, dtype=torch.float64)
        >>> responsibilities(means, weights, torch.zeros(1, 1).double(), 8.0).tolist()
        [[0.5, 0.5]]
    """
    return log_joint(means, weights, points, beta).softmax(-1)


def surrogate(
    means: Float64[Tensor, "N K"],
    weights: Float64[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    beta: float,
    fixed: Float64[Tensor, "P N"],
) -> Float64[Tensor, ""]:
    """EM's surrogate ``-sum_pm r_pm (log pi_m + log N(x_p | mean_m, I / beta))``, ``r`` fixed.

    Quadratic in the means; the M-step is its minimum.

    Args:
        means: ``[N, K]``.
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        points: ``[P, K]``.
        beta: inverse variance, above 0.
        fixed: responsibilities ``r`` that do not follow the means, ``[P, N]``.

    Returns:
        A number.

    Example:
        >>> zero, one = torch.zeros(1, 1).double(), torch.ones(1).double()
        >>> surrogate(zero, one, zero + 1, 2 * torch.pi, one[None]).item() == torch.pi
        True

    Source: Dempster, Laird and Rubin 1977, "Maximum Likelihood from Incomplete Data via the EM
    Algorithm" (their ``Q``, with the sign changed).
    """
    return -(fixed * log_joint(means, weights, points, beta)).sum()
