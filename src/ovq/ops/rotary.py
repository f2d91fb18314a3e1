"""Rotary position embeddings (RoPE) in Hugging Face's rotate-half convention."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(
    x: Float[Tensor, "*shape K"], positions: Int[Tensor, "..."], theta: float
) -> Float[Tensor, "*shape K"]:
    """Rotate each pair ``(x[a], x[a + K/2])`` by the angle ``position * theta^(-2a / K)``.

    Inner products of rotated queries and keys depend on positions only through their distance.

    Args:
        x: queries or keys ``[..., K]``, ``K`` even.
        positions: of each, in a shape that broadcasts against ``[...]``; the negative ones rotate
            back.
        theta: base of the frequencies.

    Returns:
        ``[..., K]`` in the dtype of ``x``; computed in float32 at least.

    Raises:
        ValueError: an odd ``K``.

    Example:
        >>> x = torch.ones(1, 2)
        >>> rotate(x, torch.tensor([0]), 10000.0).flatten().tolist()
        [1.0, 1.0]

    Source: "RoFormer" (arXiv 2104.09864), equation 34, pairs laid out as in Hugging Face's models.
    """
    K = x.shape[-1]
    if K % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {K}")
    # float32 loses a tenth of a radian at position 10^6; MPS has nothing better.
    precise = torch.float32 if x.device.type == "mps" else torch.float64
    exponents = torch.arange(0, K, 2, device=x.device, dtype=precise) / K
    angles = positions.to(precise)[..., None] * theta**-exponents
    working = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (f(angles).to(working) for f in (torch.cos, torch.sin))
    first, second = x.to(working).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
