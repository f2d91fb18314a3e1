"""VQ attention of short sequences: all pairs of tokens at once, and no means before blocks."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.vq_state import VQState

# A logit that no other comes near to: its weight is exactly zero, and no sum with it is infinite.
NEVER = -1e9


def attend_to_all(
    q: Float[Tensor, "B T H K"],
    k_hat: Float[Tensor, "B T G K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    codes: Float[Tensor, "G S K"],
    assigned: Int[Tensor, "B T G"],
    *,
    block_size: int,
    straight_through: str,
) -> Float[Tensor, "B T H V"]:
    """The output of :func:`~ovq.ops.vq_attention.vq_attention` from the first token on.

    The weight of a code is shared alike by the older tokens that have it. Then values need no
    means, and mean keys only their products with queries: all is of the size ``T x (T + S)``.

    Args:
        q: queries.
        k_hat: quantized keys, with the gradient of the keys.
        k: the keys themselves.
        v: values.
        beta: inverse temperatures.
        codes: without a gradient.
        assigned: the code of each key.
        block_size: ``C``, which decides where gradients flow.
        straight_through: ``"keys"`` or ``"scores"``.
    """
    (T, H), (G, S) = q.shape[1:3], codes.shape[:2]
    block, tokens = torch.arange(T, device=q.device) // block_size, torch.arange(T, device=q.device)
    is_older = block[:, None] - block > 1
    is_near = ~is_older & (tokens[:, None] >= tokens)
    queries = q.unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4)  # [B, G, J, T, K]
    keys, quantized_keys, values = (x.transpose(1, 2)[:, :, None] for x in (k, k_hat, v))
    members = F.one_hot(assigned.transpose(1, 2), S).to(q)[:, :, None]  # [B, G, 1, T, S]
    counts = is_older.to(q) @ members  # of older tokens by code, for each query
    n = counts.clamp_min(1)
    of_codes = queries @ codes[:, None].mT  # [B, G, J, T, S]
    if straight_through == "scores":
        products = queries @ keys.mT
        of_keys = _with_gradient_of(products, of_codes.detach() @ members.mT)
        of_codes = _with_gradient_of((products * is_older) @ members / n, of_codes)
    else:
        of_keys = queries @ quantized_keys.mT
    scale = beta.view(G, H // G, 1, 1)
    over_codes = torch.where(counts > 0, scale * of_codes + n.log(), NEVER)
    over_keys = torch.where(is_near, scale * of_keys, NEVER)
    weights = torch.cat([over_codes, over_keys], dim=-1).softmax(-1)
    of_older, of_near = weights.split([S, T], dim=-1)
    o = (of_near + is_older * ((of_older / n) @ members.mT)) @ values
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _with_gradient_of(x: Tensor, y: Tensor) -> Tensor:
    """The numbers of ``y`` with the gradient of ``x``."""
    return x + (y - x).detach()


def state_of_all(
    k_hat: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    assigned: Int[Tensor, "B T G"],
    *,
    num_codes: int,
    block_size: int,
) -> VQState:
    """What is left of these tokens, the first ones of their sequences."""
    (B, T, G, _), real = k_hat.shape, {"dtype": v.dtype, "device": v.device}
    seen = torch.full((B,), T, device=v.device)
    length = T if block_size > T else block_size + T % block_size  # see tail_length
    codes_of, values_of = (x[:, : T - length].transpose(1, 2) for x in (assigned, v))
    counts = codes_of.new_zeros(B, G, num_codes).scatter_add(2, codes_of, torch.ones_like(codes_of))
    sums = torch.zeros(B, G, num_codes, v.shape[3], **real).scatter_add(
        2, codes_of[..., None].expand_as(values_of), values_of
    )

    def tail_of(x: Tensor) -> Tensor:
        tail = x[:, T - length :]
        return F.pad(tail, (0, 0) * (x.ndim - 2) + (0, 2 * block_size - 1 - length))

    return VQState(
        value_means=sums / counts.clamp_min(1)[..., None],
        counts=counts,
        tail_keys=tail_of(k_hat),
        tail_values=tail_of(v),
        tail_assigned=tail_of(assigned),
        num_tokens=seen,
    )
