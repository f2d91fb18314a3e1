"""Softmax attention is kernel regression: the Nadaraya-Watson estimate with a Gaussian kernel."""

from jaxtyping import Float64
from torch import Tensor

from ovq.theory.sides import Sides


def softmax_attention(
    q: Float64[Tensor, "Q K"],
    k: Float64[Tensor, "T K"],
    v: Float64[Tensor, "T V"],
    beta: float,
) -> Float64[Tensor, "Q V"]:
    """Softmax attention of every query to every key: ``softmax(beta q k^T) v``.

    Args:
        q: queries ``[Q, K]``.
        k: keys ``[T, K]``.
        v: values ``[T, V]``.
        beta: inverse temperature.

    Returns:
        ``[Q, V]``.

    Example:
        >>> k, v = torch.eye(2).double(), torch.tensor([[1.0], [3.0]]).double()
        >>> softmax_attention(torch.zeros(1, 2).double(), k, v, 8.0).tolist()
        [[2.0]]

    Source: "Attention Is All You Need" (arXiv 1706.03762), equation 1, ``beta`` for ``K^-1/2``.
    """
    return (beta * q @ k.mT).softmax(-1) @ v


def squared_distances(
    x: Float64[Tensor, "P K"], y: Float64[Tensor, "R K"]
) -> Float64[Tensor, "P R"]:
    """``|x_p - y_r|^2``, by the differences themselves.

    Args:
        x: points ``[P, K]``.
        y: points ``[R, K]``.

    Returns:
        ``[P, R]``.

    Example:
        >>> x = torch.tensor([[0.0], [3.0]]).double()
        >>> squared_distances(x, x).tolist()
        [[0.0, 9.0], [9.0, 0.0]]
    """
    return (x[:, None] - y).square().sum(-1)


def gaussian_kernel_regression(
    q: Float64[Tensor, "Q K"],
    k: Float64[Tensor, "T K"],
    v: Float64[Tensor, "T V"],
    bandwidth: float,
    log_weights: Float64[Tensor, " T"] | None = None,
) -> Float64[Tensor, "Q V"]:
    """The Nadaraya-Watson estimate of the value at ``q`` from samples ``(k_t, v_t)``.

    ``sum_t w_t kernel(q, k_t) v_t / sum_t w_t kernel(q, k_t)`` with the Gaussian kernel
    ``exp(-|q - k|^2 / (2 bandwidth))``.

    Args:
        q: where to estimate ``[Q, K]``.
        k: inputs of the samples ``[T, K]``.
        v: outputs of the samples ``[T, V]``.
        bandwidth: the kernel's variance, above 0.
        log_weights: ``log w_t``, ``[T]``; ``None`` for equal weights.

    Returns:
        ``[Q, V]``.

    Raises:
        ValueError: a bandwidth of 0 or below.

    Example:
        >>> k, v = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[1.0], [3.0]]).double()
        >>> gaussian_kernel_regression(torch.ones(1, 1).double(), k, v, 0.5).tolist()
        [[2.0]]

    Source: Nadaraya 1964, "On Estimating Regression"; Watson 1964, "Smooth Regression Analysis".
    """
    if bandwidth <= 0:
        raise ValueError(f"bandwidth must be above 0, got {bandwidth}")
    log_kernel = -squared_distances(q, k) / (2 * bandwidth)
    if log_weights is not None:
        log_kernel = log_kernel + log_weights
    # A factor of its own for each query cancels in the ratio and keeps far queries from 0 / 0.
    kernel = (log_kernel - log_kernel.amax(-1, keepdim=True)).exp()
    return (kernel @ v) / kernel.sum(-1, keepdim=True)


def bandwidth_of(beta: float) -> float:
    """The kernel's variance ``1 / beta``.

    Raises:
        ValueError: a ``beta`` of 0 or below.

    >>> bandwidth_of(8.0)
    0.125
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    return 1 / beta


def softmax_attention_is_kernel_regression(
    q: Float64[Tensor, "Q K"],
    k: Float64[Tensor, "T K"],
    v: Float64[Tensor, "T V"],
    beta: float,
) -> Sides:
    """Attention is kernel regression of bandwidth ``1 / beta``, **if all keys have one norm**.

    ``-beta/2 |q - k|^2 = beta q.k - beta/2 |q|^2 - beta/2 |k|^2``: the query's term cancels in the
    softmax whatever its norm, the key's term only if it is the same for every key.

    Args:
        q: queries ``[Q, K]``, any norms.
        k: keys ``[T, K]``.
        v: values ``[T, V]``.
        beta: inverse temperature, above 0.

    Returns:
        Attention on the left, regression on the right, ``[Q, V]``.

    Raises:
        ValueError: a ``beta`` of 0 or below.

    Example:
        >>> q, k, v = torch.randn(3, 5, 4, dtype=torch.float64)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> softmax_attention_is_kernel_regression(q, k, v, 8.0).gap < 1e-12
        True

    Source: "Transformer Dissection" (arXiv 1908.11775) for attention as a kernel smoother.
    """
    return Sides(
        left=softmax_attention(q, k, v, beta),
        right=gaussian_kernel_regression(q, k, v, bandwidth_of(beta)),
    )


def softmax_attention_is_weighted_kernel_regression(
    q: Float64[Tensor, "Q K"],
    k: Float64[Tensor, "T K"],
    v: Float64[Tensor, "T V"],
    beta: float,
) -> Sides:
    """Attention is kernel regression with sample weights ``exp(beta/2 |k|^2)``, for any norms.

    Attention to unnormalized keys trusts long keys more than a smoother would.

    Args:
        q: queries ``[Q, K]``, any norms.
        k: keys ``[T, K]``, any norms.
        v: values ``[T, V]``.
        beta: inverse temperature, above 0.

    Returns:
        Attention on the left, weighted regression on the right, ``[Q, V]``.

    Raises:
        ValueError: a ``beta`` of 0 or below.

    Example:
        >>> q, k, v = torch.randn(3, 5, 4, dtype=torch.float64)
        >>> softmax_attention_is_weighted_kernel_regression(q, k, v, 2.0).gap < 1e-12
        True
    """
    log_weights = beta / 2 * k.square().sum(-1)
    return Sides(
        left=softmax_attention(q, k, v, beta),
        right=gaussian_kernel_regression(q, k, v, bandwidth_of(beta), log_weights),
    )
