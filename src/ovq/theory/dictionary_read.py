"""OVQ's read of its dictionary is the regression of an isotropic Gaussian mixture."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ovq.theory.gaussian_mixture_regression import GaussianMixture, conditional_mean
from ovq.theory.sides import Sides


def isotropic_mixture(
    key_means: Float64[Tensor, "N K"],
    value_means: Float64[Tensor, "N V"],
    counts: Int[Tensor, " N"],
    beta: float,
) -> GaussianMixture:
    """The mixture a dictionary stands for: ``pi = c / sum c``, ``S_kk = I / beta``, ``S_vk = 0``.

    ``S_vv = I``; the mean of the value given the key does not depend on it.

    Args:
        key_means: ``D_k``, ``[N, K]``.
        value_means: ``D_v``, ``[N, V]``.
        counts: ``c``, ``[N]``, above 0.
        beta: inverse variance of the keys of a component, above 0.

    Returns:
        The mixture of ``N`` components.

    Raises:
        ValueError: a count or ``beta`` of 0 or below.

    Example:
        >>> means = torch.eye(2).double()
        >>> isotropic_mixture(means, means, torch.tensor([3, 1]), 4.0).weights.tolist()
        [0.75, 0.25]
    """
    if (counts <= 0).any():
        raise ValueError(f"counts must be above 0, got {counts.tolist()}")
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    (N, K), V = key_means.shape, value_means.shape[-1]
    return GaussianMixture(
        weights=counts.to(key_means) / counts.sum(),
        key_means=key_means,
        value_means=value_means,
        key_covariances=torch.eye(K).to(key_means).expand(N, K, K) / beta,
        value_key_covariances=key_means.new_zeros(N, V, K),
        value_covariances=torch.eye(V).to(key_means).expand(N, V, V),
    )


def dictionary_read(
    q: Float64[Tensor, "Q K"],
    key_means: Float64[Tensor, "N K"],
    value_means: Float64[Tensor, "N V"],
    counts: Int[Tensor, " N"],
    beta: float,
) -> Float64[Tensor, "Q V"]:
    """OVQ's read of a dictionary: ``softmax(beta q D_k^T + log c) D_v``.

    Args:
        q: queries ``[Q, K]``.
        key_means: ``D_k``, ``[N, K]``.
        value_means: ``D_v``, ``[N, V]``.
        counts: ``c``, ``[N]``, above 0.
        beta: inverse temperature.

    Returns:
        ``[Q, V]``.

    Example:
        >>> D_k, D_v = torch.eye(2).double(), torch.tensor([[0.0], [4.0]]).double()
        >>> q, c = torch.zeros(1, 2).double(), torch.tensor([3, 1])
        >>> dictionary_read(q, D_k, D_v, c, 8.0).tolist()
        [[1.0]]

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922).
    """
    return (beta * q @ key_means.mT + counts.to(q).log()).softmax(-1) @ value_means


def norm_corrected_read(
    q: Float64[Tensor, "Q K"],
    key_means: Float64[Tensor, "N K"],
    value_means: Float64[Tensor, "N V"],
    counts: Int[Tensor, " N"],
    beta: float,
) -> Float64[Tensor, "Q V"]:
    """The read for key means of any norms: ``softmax(beta q D_k^T + log c - beta/2 |D_k|^2) D_v``.

    Args:
        q: queries ``[Q, K]``.
        key_means: ``D_k``, ``[N, K]``.
        value_means: ``D_v``, ``[N, V]``.
        counts: ``c``, ``[N]``, above 0.
        beta: inverse temperature.

    Returns:
        ``[Q, V]``.

    Example:
        >>> D_k, D_v = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[0.0], [4.0]]).double()
        >>> halfway = torch.ones(1, 1).double()
        >>> norm_corrected_read(halfway, D_k, D_v, torch.tensor([1, 1]), 8.0).tolist()
        [[2.0]]
    """
    norms = key_means.square().sum(-1)
    logits = beta * q @ key_means.mT + counts.to(q).log() - beta / 2 * norms
    return logits.softmax(-1) @ value_means


def dictionary_read_is_conditional_mean(
    q: Float64[Tensor, "Q K"],
    key_means: Float64[Tensor, "N K"],
    value_means: Float64[Tensor, "N V"],
    counts: Int[Tensor, " N"],
    beta: float,
) -> Sides:
    """OVQ's read is the isotropic mixture's conditional mean, **if the key means have one norm**.

    Args:
        q: queries ``[Q, K]``, any norms.
        key_means: ``D_k``, ``[N, K]``.
        value_means: ``D_v``, ``[N, V]``.
        counts: ``c``, ``[N]``, above 0.
        beta: inverse temperature, above 0.

    Returns:
        The read on the left, the mixture's conditional mean on the right, ``[Q, V]``.

    Example:
        >>> q, D_k, D_v = torch.randn(3, 5, 4, dtype=torch.float64)
        >>> D_k, c = torch.nn.functional.normalize(D_k, dim=-1), torch.arange(1, 6)
        >>> dictionary_read_is_conditional_mean(q, D_k, D_v, c, 8.0).gap < 1e-12
        True

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922).
    """
    mixture = isotropic_mixture(key_means, value_means, counts, beta)
    return Sides(
        left=dictionary_read(q, key_means, value_means, counts, beta),
        right=conditional_mean(mixture, q),
    )


def norm_corrected_read_is_conditional_mean(
    q: Float64[Tensor, "Q K"],
    key_means: Float64[Tensor, "N K"],
    value_means: Float64[Tensor, "N V"],
    counts: Int[Tensor, " N"],
    beta: float,
) -> Sides:
    """The read with the term ``-beta/2 |D_k|^2`` is the conditional mean, for any norms.

    Args:
        q: queries ``[Q, K]``, any norms.
        key_means: ``D_k``, ``[N, K]``, any norms.
        value_means: ``D_v``, ``[N, V]``.
        counts: ``c``, ``[N]``, above 0.
        beta: inverse temperature, above 0.

    Returns:
        The read on the left, the mixture's conditional mean on the right, ``[Q, V]``.

    Example:
        >>> q, D_k, D_v = torch.randn(3, 5, 4, dtype=torch.float64)
        >>> c = torch.arange(1, 6)
        >>> norm_corrected_read_is_conditional_mean(q, D_k, D_v, c, 2.0).gap < 1e-12
        True
    """
    mixture = isotropic_mixture(key_means, value_means, counts, beta)
    return Sides(
        left=norm_corrected_read(q, key_means, value_means, counts, beta),
        right=conditional_mean(mixture, q),
    )
