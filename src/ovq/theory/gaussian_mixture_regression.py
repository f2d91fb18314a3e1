"""Gaussian mixture regression: the mean of the value given the key, for any covariances."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.distributions import MultivariateNormal

from ovq.theory.sides import Sides


@dataclass(frozen=True, kw_only=True)
class GaussianMixture:
    """A Gaussian mixture over pairs of a key and a value, with full covariances.

    Attributes:
        weights: ``pi``, ``[N]``, above 0, their sum 1.
        key_means: ``[N, K]``.
        value_means: ``[N, V]``.
        key_covariances: ``S_kk``, ``[N, K, K]``.
        value_key_covariances: ``S_vk``, ``[N, V, K]``.
        value_covariances: ``S_vv``, ``[N, V, V]``.
    """

    weights: Float64[Tensor, " N"]
    key_means: Float64[Tensor, "N K"]
    value_means: Float64[Tensor, "N V"]
    key_covariances: Float64[Tensor, "N K K"]
    value_key_covariances: Float64[Tensor, "N V K"]
    value_covariances: Float64[Tensor, "N V V"]


def joint_density(
    mixture: GaussianMixture, keys: Float64[Tensor, "P K"], values: Float64[Tensor, "P V"]
) -> Float64[Tensor, " P"]:
    """``p(k, v) = sum_m pi_m N([k; v] | [mean_k; mean_v], [[S_kk, S_kv], [S_vk, S_vv]])``.

    Args:
        mixture: over keys and values.
        keys: ``[P, K]``.
        values: ``[P, V]``.

    Returns:
        The density at each pair, ``[P]``.

    Example:
        >>> I = torch.ones(1, 1, 1).double()
        >>> mixture = GaussianMixture(
        ...     weights=torch.ones(1).double(), key_means=I[0], value_means=I[0],
        ...     key_covariances=I, value_key_covariances=0 * I, value_covariances=I,
        ... )
        >>> round(joint_density(mixture, I[0], I[0]).item() * 2 * torch.pi, 6)
        1.0
    """
    S_vk = mixture.value_key_covariances
    upper = torch.cat([mixture.key_covariances, S_vk.mT], dim=-1)
    lower = torch.cat([S_vk, mixture.value_covariances], dim=-1)
    means = torch.cat([mixture.key_means, mixture.value_means], dim=-1)
    components = MultivariateNormal(means, torch.cat([upper, lower], dim=-2))
    pairs = torch.cat([keys, values], dim=-1)
    return components.log_prob(pairs[:, None]).exp() @ mixture.weights


def conditional_mean(mixture: GaussianMixture, q: Float64[Tensor, "Q K"]) -> Float64[Tensor, "Q V"]:
    """The mean of the value given that the key is ``q``.

    ``E[v | q] = sum_m p(m | q) (mean_v + S_vk S_kk^-1 (q - mean_k))`` with the posterior
    responsibilities ``p(m | q)`` proportional to ``pi_m N(q | mean_k, S_kk)``.

    Args:
        mixture: over keys and values.
        q: the given keys ``[Q, K]``.

    Returns:
        ``[Q, V]``.

    Example:
        >>> I = torch.ones(1, 1, 1).double()
        >>> mixture = GaussianMixture(
        ...     weights=torch.ones(1).double(), key_means=I[0], value_means=I[0],
        ...     key_covariances=I, value_key_covariances=I / 2, value_covariances=I,
        ... )
        >>> conditional_mean(mixture, 3 * I[0]).tolist()
        [[2.0]]

    Source: Ghahramani and Jordan 1993, "Supervised learning from incomplete data via an EM
    approach", for the conditional mean of a mixture as a regression.
    """
    components = MultivariateNormal(mixture.key_means, mixture.key_covariances)
    posterior = (mixture.weights.log() + components.log_prob(q[:, None])).softmax(-1)  # [Q, N]
    slopes = torch.linalg.solve(mixture.key_covariances, mixture.value_key_covariances.mT)
    offsets = q[:, None] - mixture.key_means  # [Q, N, K]
    expected = mixture.value_means + torch.einsum("qnk,nkv->qnv", offsets, slopes)
    return torch.einsum("qn,qnv->qv", posterior, expected)


def conditional_mean_is_ratio_of_integrals(
    mixture: GaussianMixture, q: Float64[Tensor, "Q K"], grid: Float64[Tensor, " R"]
) -> Sides:
    """The formula of the conditional mean is ``int v p(q, v) dv / int p(q, v) dv``.

    Args:
        mixture: over keys and values of one dimension, ``V = 1``.
        q: the given keys ``[Q, K]``.
        grid: ascending values ``[R]`` that the trapezoid rule integrates over. It converges
            faster than any power of the spacing, if the grid reaches far into both tails.

    Returns:
        The formula on the left, the integrals of the joint density on the right, ``[Q, 1]``.

    Raises:
        ValueError: values of more than one dimension.

    Example:
        >>> I = torch.ones(1, 1, 1).double()
        >>> mixture = GaussianMixture(
        ...     weights=torch.ones(1).double(), key_means=I[0], value_means=I[0],
        ...     key_covariances=I, value_key_covariances=I / 2, value_covariances=I,
        ... )
        >>> grid = torch.linspace(-9, 9, 200, dtype=torch.float64)
        >>> conditional_mean_is_ratio_of_integrals(mixture, 3 * I[0], grid).gap < 1e-12
        True
    """
    if mixture.value_means.shape[-1] != 1:
        raise ValueError(
            "mixture must have values of one dimension to be integrated over, "
            f"got {mixture.value_means.shape[-1]}"
        )
    keys = q.repeat_interleave(len(grid), dim=0)  # every query with every value of the grid
    values = grid.repeat(len(q))[:, None]
    density = joint_density(mixture, keys, values).unflatten(0, (len(q), len(grid)))
    mean = torch.trapezoid(grid * density, grid) / torch.trapezoid(density, grid)
    return Sides(left=conditional_mean(mixture, q), right=mean[:, None])
