"""What every attention-like operator asks of its tensors."""

from collections.abc import Sequence

from torch import Tensor


def check_floating(num_axes: int, **tensors: Tensor) -> None:
    """Raise unless the tensors, by the names of their arguments, have that many axes.

    Raises:
        ValueError: other axes, or whole numbers.
    """
    for name, x in tensors.items():
        if x.ndim != num_axes or not x.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor of {num_axes} axes, "
                f"got {x.dtype} {tuple(x.shape)}"
            )


def check_shape(axes: str, shape: Sequence[int], **tensors: Tensor) -> None:
    """Raise unless the tensors, by the names of their arguments, have that shape.

    Args:
        axes: the shape in words, such as ``"[B, T, H]"``.
        shape: the shape in numbers.
        **tensors: what must have it.

    Raises:
        ValueError: another shape, or whole numbers.
    """
    for name, x in tensors.items():
        if tuple(x.shape) != tuple(shape) or not x.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor {axes} = {tuple(shape)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q ``[B, T, H, K]``, k ``[B, T, G, K]`` and v ``[B, T, G, V]`` fit one another.

    Raises:
        ValueError: other axes, another dtype, or ``G`` not dividing ``H``.
    """
    check_floating(4, q=q, k=k, v=v)
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
