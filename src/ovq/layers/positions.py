"""Where the next tokens of each row stand, for rotary embeddings and scalable softmax."""

import torch
from jaxtyping import Int
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
