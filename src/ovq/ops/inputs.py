"""What every attention-like operator asks of its queries, keys and values."""

from torch import Tensor


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q ``[B, T, H, K]``, k ``[B, T, G, K]`` and v ``[B, T, G, V]`` fit one another.

    Raises:
        ValueError: other axes, another dtype, or ``G`` not dividing ``H``.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor of 4 axes, got {x.dtype} {tuple(x.shape)}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k must have the batch, tokens and head dim of q {tuple(q.shape)}, "
            f"got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have the batch, tokens and heads of k {tuple(k.shape)}, got {tuple(v.shape)}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the heads of k must divide the heads of q, got {k.shape[2]} and {q.shape[2]}"
        )
