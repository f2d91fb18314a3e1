"""Rotary position embeddings (RoPE) in Hugging Face's rotate-half convention."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.layers.base import MixerState


def token_positions(
    state: MixerState | None, num_new: int, device: torch.device
) -> Int[Tensor, "R T"]:
    """Positions of the next tokens of each row, counted from 0 at the start of its sequence.

    Args:
        state: what came before; ``None`` at the start.
        num_new: the tokens ``T`` to come.
        device: of the result.

    Returns:
        ``[B, T]`` int64, or ``[1, T]`` at the start, where all rows agree.
    """
    new = torch.arange(num_new, device=device)
    return new[None] if state is None else state.num_tokens.to(device)[:, None] + new


def rotate(
    x: Float[Tensor, "B T H K"], positions: Int[Tensor, "R T"], theta: float
) -> Float[Tensor, "B T H K"]:
    """Rotate each pair ``(x[a], x[a + K/2])`` by the angle ``position * theta^(-2a / K)``.

    Inner products of rotated queries and keys depend on positions only through their distance.

    Args:
        x: queries or keys ``[B, T, H, K]``, ``K`` even.
        positions: ``[B, T]``, or ``[1, T]`` for all rows alike.
        theta: base of the frequencies.

    Returns:
        ``[B, T, H, K]`` in the dtype of ``x``; computed in float32 at least.

    Raises:
        ValueError: an odd ``K``.

    Example:
        >>> x = torch.ones(1, 1, 1, 2)
        >>> rotate(x, torch.tensor([[0]]), 10000.0).flatten().tolist()
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
    cos, sin = (f(angles)[:, :, None].to(working) for f in (torch.cos, torch.sin))
    first, second = x.to(working).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
