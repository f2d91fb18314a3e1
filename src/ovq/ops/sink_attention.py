"""A rotary window and the first tokens, in one softmax: what is left of attention without the rest.

Source: "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). There the
positions are those in the cache; here tokens of the window keep their distances, and so do the
first tokens up to ``max_position``.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ovq.ops.attention import KVState, causal_mask
from ovq.ops.first_tokens import FirstTokensState, attend_with_first_tokens
from ovq.ops.rotary import rotate

BLOCK = 256  # queries that are read at once: the logits are so many times the window and they


@dataclass(frozen=True, kw_only=True)
class SinkState(FirstTokensState):
    """What the operator remembers, an immutable value with one row a sequence.

    Attributes:
        first_keys: ``[B, S, G, K]``, the keys of the first tokens before rotation, zeros past
            ``num_first``.
        first_values: ``[B, S, G, V]``.
        num_first: ``[B]`` int64, first tokens seen, at most ``S``.
        memory: the latest ``W - 1`` tokens after them, keys rotated.
    """

    memory: KVState

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        window_size: int,
        num_first_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "SinkState":
        """The state before the first token."""
        memory = KVState.empty(
            num_rows, num_kv_heads, key_dim, value_dim,
            window_size=window_size, dtype=dtype, device=device,
        )  # fmt: skip
        return cls.around(memory, memory.keys, (num_first_tokens, num_kv_heads, key_dim, value_dim))


def sink_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: float,
    state: SinkState,
    *,
    rope_theta: float,
    max_position: int,
) -> tuple[Float[Tensor, "B T H V"], SinkState]:
    """Softmax attention with rotary positions to the first ``S`` tokens and the latest ``W``.

    Args:
        q: queries ``[B, T, H, K]`` before rotation.
        k: keys ``[B, T, G, K]`` before rotation; ``G`` divides ``H``.
        v: values ``[B, T, G, V]``.
        beta: inverse temperature, say ``K^-1/2``.
        state: what came before, with the sizes ``S`` and ``W``. It is not changed.
        rope_theta: base of the rotary frequencies.
        max_position: the last position from which the first tokens are read.

    Returns:
        Output ``[B, T, H, V]`` in the dtype of ``q``, and the state.

    Example:
        >>> q, k = torch.randn(1, 50, 4, 8), torch.randn(1, 50, 2, 8)
        >>> state = SinkState.empty(1, 2, 8, 8, window_size=10, num_first_tokens=2)
        >>> o, state = sink_attention(q, k, k, 0.35, state, rope_theta=10000.0, max_position=100)
        >>> tuple(o.shape), state.memory.keys.shape[1]
        ((1, 50, 4, 8), 9)
    """

    def read_rest(q, k, v, memory):
        return _read_window(q, k, v, memory, rope_theta)

    return attend_with_first_tokens(
        q, k, v, beta, state, read_rest, rope_theta=rope_theta, max_position=max_position
    )


def _read_window(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    memory: KVState,
    rope_theta: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"], KVState]:
    """Attention of the tokens after the first to the window; output, log-sum-exp, and memory."""
    T, num_past, W = q.shape[1], memory.keys.shape[1], memory.window_size
    assert W is not None
    places = (memory.num_tokens[:, None] + torch.arange(T, device=q.device))[..., None]
    q, k = (rotate(x, places, rope_theta) for x in (q, k))
    keys, values = (
        torch.cat([past.to(new.dtype), new], dim=1)
        for past, new in ((memory.keys, k), (memory.values, v))
    )
    held = torch.cat([memory.held_by_row(), places.new_ones(len(q), T, dtype=torch.bool)], dim=1)
    outputs, lses = [], []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        seen = slice(max(0, num_past + start - (W - 1)), num_past + stop)
        mask = causal_mask(stop - start, seen.stop - seen.start, W, q.device)
        mask = mask & held[:, None, seen]
        o, lse = _read_block(
            q[:, start:stop], keys[:, seen].to(q.dtype), values[:, seen].to(q.dtype), mask
        )
        outputs.append(o)
        lses.append(lse)
    if not outputs:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3]), memory
    # A copy: a view would keep the keys of every token alive.
    left = max(0, num_past + T - (W - 1))
    after = replace(
        memory,
        keys=keys[:, left:].clone(),
        values=values[:, left:].clone(),
        num_tokens=memory.num_tokens + T,
    )
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=1), after


def _read_block(
    q: Float[Tensor, "B t H K"],
    k: Float[Tensor, "B s G K"],
    v: Float[Tensor, "B s G V"],
    mask: Bool[Tensor, "B t s"],
) -> tuple[Float[Tensor, "B t H V"], Float[Tensor, "B t H"]]:
    """Softmax attention of queries that each see some key; output and log-sum-exp."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.unflatten(2, (k.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [B, G, J, t, K]
    logits = (grouped.flatten(2, 3) @ k.mT).unflatten(2, grouped.shape[2:4])
    logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    most = logits.amax(-1, keepdim=True)
    weights = (logits - most).exp()  # once, for the output and for the sum
    total = weights.sum(-1, keepdim=True)
    o = (weights.flatten(2, 3) @ v).unflatten(2, grouped.shape[2:4]) / total
    lse = (most + total.log())[..., 0]
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2)
