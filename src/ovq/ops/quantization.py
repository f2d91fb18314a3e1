"""Vectors to the nearest of a codebook's codes, with a gradient that goes straight through."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.decay import without_autocast

# Scores closer than this are ties, which go to the lower code: rounding then decides no assignment.
GRID = 2.0**16


def nearest_codes(
    x: Float[Tensor, "B T G K"], codes: Float[Tensor, "G S K"]
) -> Int[Tensor, "B T G"]:
    """The code of least Euclidean distance to each vector, compared in float32 at least.

    ``argmax_m x . c_m - |c_m|^2 / 2`` after rounding to multiples of 2^-16; ties go to the lower
    code.

    Args:
        x: ``[B, T, G, K]``, near unit norm for the rounding to mean what it should.
        codes: one codebook a head, ``[G, S, K]``.

    Returns:
        ``[B, T, G]`` int64 in ``[0, S)``. No gradient flows through it.

    Example:
        >>> codes = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])
        >>> nearest_codes(torch.tensor([[[[0.4, 0.0]], [[0.6, 9.0]]]]), codes).flatten().tolist()
        [0, 1]
    """
    working = torch.promote_types(x.dtype, torch.float32)
    assigned = []
    with torch.no_grad(), without_autocast(x.device):
        for x_of_head, c in zip(x.to(working).unbind(2), codes.to(working).unbind(0), strict=True):
            scores = x_of_head @ c.mT - c.square().sum(-1) / 2  # a head at a time: [B, T, S]
            assigned.append(torch.round(scores * GRID).argmax(-1))
    return torch.stack(assigned, dim=2)


def quantized(
    x: Float[Tensor, "B T G K"], codes: Float[Tensor, "G S K"], assigned: Int[Tensor, "B T G"]
) -> Float[Tensor, "B T G K"]:
    """The codes of the vectors, whose gradient goes straight through to the vectors."""
    of_head = torch.arange(codes.shape[0], device=codes.device)
    return codes.detach().to(x.dtype)[of_head, assigned] + (x - x.detach())
