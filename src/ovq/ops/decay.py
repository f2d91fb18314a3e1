"""What recurrences with a decay share: chunks of tokens, and the decays between tokens."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def in_chunks(x: Float[Tensor, "B T H *F"], chunk_size: int) -> Float[Tensor, "M B H C *F"]:
    """The tokens in ``M`` chunks of ``C``, chunks first; zeros fill the last one.

    Example:
        >>> tuple(in_chunks(torch.randn(2, 10, 3, 5), 4).shape)
        (3, 2, 3, 4, 5)
    """
    fill = -x.shape[1] % chunk_size
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill)).unflatten(1, (-1, chunk_size))
    return x.movedim(1, 0).transpose(2, 3).contiguous()


def out_of_chunks(x: Float[Tensor, "M B H C V"], num_tokens: int) -> Float[Tensor, "B T H V"]:
    """The inverse of :func:`in_chunks` for ``T`` tokens."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens]


def decay_between(g: Float[Tensor, "*B C"]) -> Float[Tensor, "*B C C"]:
    """The decay from token ``j`` to token ``i`` of a chunk, ``exp(sum_(j < m <= i) g_m)``.

    Every sum is taken by itself, as a product with a triangle of ones. A difference of cumulative
    sums would be as wrong as their rounding, and they grow without bound where decay is strong.

    Args:
        g: log decay of each token, finite and not above 0, ``[..., C]``.

    Returns:
        ``[..., C (i), C (j)]``: 1 where ``i = j``, 0 where ``i < j``.

    Example:
        >>> decay_between(torch.tensor([-5.0, -1.0, -2.0])).log()
        tensor([[ 0., -inf, -inf],
                [-1.,  0., -inf],
                [-3., -2.,  0.]])

    Source: the segment sums of "Transformers are SSMs" (arXiv 2405.21060), listing 1.
    """
    C = g.shape[-1]
    ones = g.new_ones(C, C)
    after = ones.triu(1)  # [j, m]: j < m
    sums = ((g[..., None, :] * after) @ ones.triu()).mT
    return sums.masked_fill(after.bool(), -torch.inf).exp()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which nothing on the device is computed in a lower precision than it has."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
