"""What a read loses when the keys of a slot are merged into their mean and their number."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ovq.theory.dictionary_read import dictionary_read
from ovq.theory.kernel_regression import softmax_attention
from ovq.theory.running_means import batch_means
from ovq.theory.sides import Sides


def dictionary_read_is_softmax_attention(
    q: Float64[Tensor, "Q K"],
    k: Float64[Tensor, "T K"],
    v: Float64[Tensor, "T V"],
    slots: Int[Tensor, " T"],
    num_slots: int,
    beta: float,
) -> Sides:
    """A read of the dictionary is attention to all its tokens, **if each slot's keys are equal**.

    So it is with every token in a slot of its own (``N >= T``), and with repeated keys that share
    a slot, whatever their values: the mean of the values is what attention makes of them.

    Args:
        q: queries ``[Q, K]``.
        k: keys ``[T, K]``.
        v: values ``[T, V]``.
        slots: the slot of each token, ``[T]``; each slot has tokens.
        num_slots: ``N``.
        beta: inverse temperature.

    Returns:
        The dictionary's read on the left, attention to the tokens on the right, ``[Q, V]``.

    Example:
        >>> q, k, v = torch.randn(3, 6, 4, dtype=torch.float64)
        >>> dictionary_read_is_softmax_attention(q, k, v, torch.arange(6), 6, 2.0).gap < 1e-12
        True

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922).
    """
    key_means, counts = batch_means(k, slots, num_slots)
    value_means, _ = batch_means(v, slots, num_slots)
    return Sides(
        left=dictionary_read(q, key_means, value_means, counts, beta),
        right=softmax_attention(q, k, v, beta),
    )


def exact_log_weight(
    q: Float64[Tensor, "Q K"], keys: Float64[Tensor, "c K"], beta: float
) -> Float64[Tensor, " Q"]:
    """What the keys of one slot weigh in attention: ``log sum_j exp(beta q.k_j)``.

    Args:
        q: queries ``[Q, K]``.
        keys: the keys of the slot, ``[c, K]``.
        beta: inverse temperature.

    Returns:
        ``[Q]``.

    Example:
        >>> exact_log_weight(torch.zeros(1, 2).double(), torch.eye(2).double(), 8.0).exp().tolist()
        [2.0]
    """
    return (beta * q @ keys.mT).logsumexp(-1)


def merged_log_weight(
    q: Float64[Tensor, "Q K"], keys: Float64[Tensor, "c K"], beta: float
) -> Float64[Tensor, " Q"]:
    """What their mean weighs in OVQ's read: ``log c + beta q.mean``.

    Args:
        q: queries ``[Q, K]``.
        keys: the keys of the slot, ``[c, K]``.
        beta: inverse temperature.

    Returns:
        ``[Q]``.

    Example:
        >>> merged_log_weight(torch.zeros(1, 2).double(), torch.eye(2).double(), 8.0).exp().tolist()
        [2.0]
    """
    return torch.tensor(len(keys)).to(keys).log() + beta * q @ keys.mean(0)


def key_covariance(keys: Float64[Tensor, "c K"]) -> Float64[Tensor, "K K"]:
    """The covariance of the keys of one slot, divided by their number ``c``.

    Args:
        keys: ``[c, K]``.

    Returns:
        ``[K, K]``.

    Example:
        >>> key_covariance(torch.tensor([[1.0], [5.0]]).double()).tolist()
        [[4.0]]
    """
    offsets = keys - keys.mean(0)
    return offsets.mT @ offsets / len(keys)


def second_order_log_weight(
    q: Float64[Tensor, "Q K"], keys: Float64[Tensor, "c K"], beta: float
) -> Float64[Tensor, " Q"]:
    """The merged weight with the keys' spread along the query: ``+ beta^2/2 q^T Sigma q``.

    Args:
        q: queries ``[Q, K]``.
        keys: the keys of the slot, ``[c, K]``; ``Sigma`` is their covariance.
        beta: inverse temperature.

    Returns:
        ``[Q]``.

    Example:
        >>> one, keys = torch.ones(1, 1).double(), torch.tensor([[-2.0], [2.0]]).double()
        >>> spread = second_order_log_weight(one, keys, 1.0) - merged_log_weight(one, keys, 1.0)
        >>> spread.tolist()
        [2.0]
    """
    spread = torch.einsum("qk,kl,ql->q", q, key_covariance(keys), q)
    return merged_log_weight(q, keys, beta) + beta**2 / 2 * spread


def exact_weight_is_above_merged_weight(
    q: Float64[Tensor, "Q K"], keys: Float64[Tensor, "c K"], beta: float
) -> Sides:
    """Jensen's inequality: merging never overrates a slot; ``left >= right``.

    Equal if and only if ``q . k_j`` is the same for all keys of the slot.

    Args:
        q: queries ``[Q, K]``.
        keys: the keys of the slot, ``[c, K]``.
        beta: inverse temperature.

    Returns:
        The exact log weight on the left, the merged one on the right, ``[Q]``.

    Example:
        >>> q, keys = torch.randn(2, 5, 4, dtype=torch.float64)
        >>> sides = exact_weight_is_above_merged_weight(q, keys, 2.0)
        >>> bool((sides.left >= sides.right).all())
        True
    """
    return Sides(left=exact_log_weight(q, keys, beta), right=merged_log_weight(q, keys, beta))


def exact_weight_is_second_order_weight(
    q: Float64[Tensor, "Q K"], keys: Float64[Tensor, "c K"], beta: float
) -> Sides:
    """The spread along the query makes up for merging, **but for third order in the spread**.

    ``log mean_j exp(x_j)`` is the cumulant generating function of ``x_j = beta q.k_j`` at 1: its
    first cumulant is the merged weight, its second ``beta^2 q^T Sigma q``.

    Args:
        q: queries ``[Q, K]``.
        keys: the keys of the slot, ``[c, K]``.
        beta: inverse temperature.

    Returns:
        The exact log weight on the left, the second-order one on the right, ``[Q]``.

    Example:
        >>> q, keys = torch.randn(2, 5, 4, dtype=torch.float64)
        >>> exact_weight_is_second_order_weight(q, keys / 1000, 1.0).gap < 1e-6
        True
    """
    return Sides(left=exact_log_weight(q, keys, beta), right=second_order_log_weight(q, keys, beta))


def trace_of_covariance_is_one_minus_squared_norm(keys: Float64[Tensor, "c K"]) -> Sides:
    """The norm of a mean tells its slot's spread: ``tr Sigma = 1 - |mean|^2``, **for unit norms**.

    In general ``tr Sigma`` is the mean of ``|k|^2`` less ``|mean|^2``.

    Args:
        keys: the keys of the slot, ``[c, K]``, of unit norm.

    Returns:
        The trace of the covariance on the left, ``1 - |mean|^2`` on the right, scalars.

    Example:
        >>> keys = torch.nn.functional.normalize(torch.randn(5, 4, dtype=torch.float64), dim=-1)
        >>> trace_of_covariance_is_one_minus_squared_norm(keys).gap < 1e-12
        True
    """
    return Sides(left=key_covariance(keys).trace(), right=1 - keys.mean(0).square().sum())
