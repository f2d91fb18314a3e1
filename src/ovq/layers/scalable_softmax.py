"""Scalable softmax (SSMax): attention that stays as sharp however much there is to attend to."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.layers.base import MixerState
from ovq.layers.positions import token_positions


def check_ssmax_length(length: int | None) -> None:
    """Raise unless it is ``None`` or an integer of at least 2.

    Raises:
        ValueError: another value.
    """
    if length is not None and (type(length) is not int or length < 2):
        raise ValueError(f"ssmax_length must be an integer of at least 2, or none, got {length!r}")


def ssmax_scale(num_keys: Float[Tensor, "*shape"], length: int) -> Float[Tensor, "*shape"]:
    """``log(n) / log(length)``.

    Args:
        num_keys: ``n``, at least 1: how many there are to attend to.
        length: where the scale is 1.
    """
    return num_keys.log() / math.log(length)


def scale_queries(
    q: Float[Tensor, "B T H K"], state: MixerState | None, length: int | None
) -> Float[Tensor, "B T H K"]:
    """Queries times :func:`ssmax_scale` of the tokens each has to attend to, itself included.

    A softmax over ``n`` numbers, of which one is larger than the others by ``d``, gives it
    ``1 / (1 + (n - 1) exp(-d))``: less and less as ``n`` grows, unless ``d`` grows with ``log n``.

    Args:
        q: queries.
        state: what came before; ``None`` at the start.
        length: where the scale is 1; ``None`` for no scaling.

    Returns:
        The queries in their dtype.

    Source: "Scalable-Softmax Is Superior for Attention" (arXiv 2501.19399). Its ``s`` a head, which
    is learned, is in the norm of the queries or in ``beta`` here.

    >>> scale_queries(torch.ones(1, 4, 1, 1), None, length=4).flatten().tolist()
    [0.0, 0.5, 0.7924812436103821, 1.0]
    """
    if length is None:
        return q
    seen = token_positions(state, q.shape[1], q.device) + 1
    scale = ssmax_scale(seen.to(torch.promote_types(q.dtype, torch.float32)), length)
    return (q * scale[..., None, None]).to(q.dtype)
