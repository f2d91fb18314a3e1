"""Exact softmax attention over all tokens or a sliding window, its past in an immutable state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVState:
    """Keys and values of the past, an immutable value with one row a sequence.

    Rows end at the same place: the last entry of every row is its latest token, so that distances
    between tokens do not depend on the row. A row with fewer than ``L`` tokens starts with zeros
    that no query sees.

    Attributes:
        keys: ``[B, L, G, K]``. All tokens without a window; the latest ``min(t, W - 1)`` with one,
            since a later token sees itself and the ``W - 1`` before it.
        values: ``[B, L, G, V]``.
        num_tokens: ``[B]`` int64, tokens seen by each row.
        window_size: the window ``W`` it was made with, ``None`` for all tokens.
        ragged: whether some row may hold fewer than ``L`` tokens.
    """

    keys: Float[Tensor, "B L G K"]
    values: Float[Tensor, "B L G V"]
    num_tokens: Int[Tensor, " B"]
    window_size: int | None = None
    ragged: bool = False

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        window_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "KVState":
        """The state before the first token."""
        return cls(
            keys=torch.zeros(num_rows, 0, num_kv_heads, key_dim, dtype=dtype, device=device),
            values=torch.zeros(num_rows, 0, num_kv_heads, value_dim, dtype=dtype, device=device),
            num_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
            window_size=window_size,
        )

    @classmethod
    def concat(cls, states: Sequence["KVState"]) -> "KVState":
        """One state with the rows of several, in order; shorter ones are filled up with zeros.

        Raises:
            ValueError: no state given, or their windows differ.
        """
        if not states:
            raise ValueError("states must hold at least one state, got none")
        windows = {state.window_size for state in states}
        if len(windows) > 1:
            raise ValueError(f"states must share one window_size, got {windows}")
        lengths = [state.keys.shape[1] for state in states]
        missing = [max(lengths) - length for length in lengths]

        def joined(name: str) -> Tensor:
            rows = [getattr(state, name) for state in states]
            return torch.cat(
                [F.pad(r, (0, 0, 0, 0, n, 0)) for r, n in zip(rows, missing, strict=True)]
            )

        return replace(
            states[0],
            keys=joined("keys"),
            values=joined("values"),
            num_tokens=torch.cat([state.num_tokens for state in states]),
            ragged=any(missing) or any(state.ragged for state in states),
        )

    @property
    def num_rows(self) -> int:
        """Number of sequences ``B``."""
        return self.keys.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors held."""
        tensors = (self.keys, self.values, self.num_tokens)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def select_rows(self, rows: Int[Tensor, " R"]) -> "KVState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "KVState":
        """The same numbers, cut from the autograd graph."""
        return self._map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "KVState":
        """The same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def held_by_row(self) -> Bool[Tensor, "B L"]:
        """Which entries are tokens of their row: all but the zeros that fill short rows up."""
        length = self.keys.shape[1]
        places = torch.arange(length, device=self.keys.device)
        return places >= length - self.num_tokens[:, None]

    def _map(self, function: Callable[[Tensor], Tensor]) -> "KVState":
        return replace(
            self,
            keys=function(self.keys),
            values=function(self.values),
            num_tokens=function(self.num_tokens),
        )


def softmax_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    state: KVState | None = None,
    *,
    window_size: int | None = None,
    scale: float | None = None,
) -> tuple[Float[Tensor, "B T H V"], KVState]:
    """Causal softmax attention: token ``i`` sees ``j <= i``, with a window ``i - W < j <= i``.

    ``o_i = sum_j softmax_j(scale * q_i . k_j) v_j``. With a window, memory and time are linear in
    ``T``: blocks of ``W`` queries attend to their own block of keys and the one before.

    Args:
        q: queries ``[B, T, H, K]``.
        k: keys ``[B, T, G, K]``; ``G`` divides ``H`` (grouped queries).
        v: values ``[B, T, G, V]``.
        state: what came before; ``None`` at the start. It is not changed.
        window_size: the window ``W >= 1``; ``None`` for all tokens.
        scale: factor on the inner products; ``None`` for ``K^-1/2``.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the state after the last token.

    Raises:
        ValueError: shapes that do not fit, ``window_size < 1``, or a state of another batch size,
            other heads or another window.

    Example:
        >>> q = k = v = torch.randn(1, 8, 2, 4)
        >>> o, state = softmax_attention(q, k, v, window_size=3)
        >>> tuple(o.shape), state.keys.shape[1]
        ((1, 8, 2, 4), 2)

    Source: "Attention Is All You Need" (arXiv 1706.03762), equation 1; the window as in
    "Longformer" (arXiv 2004.05150).
    """
    _check_inputs(q, k, v, window_size)
    if state is None:
        state = KVState.empty(
            k.shape[0], k.shape[2], k.shape[3], v.shape[3],
            window_size=window_size, dtype=k.dtype, device=k.device,
        )  # fmt: skip
    _check_state(state, k, v, window_size)
    num_past, T = state.keys.shape[1], q.shape[1]
    keys = torch.cat([state.keys.to(k.dtype), k], dim=1)
    values = torch.cat([state.values.to(v.dtype), v], dim=1)

    num_head = T if window_size is None else min(T, window_size)
    seen = slice(0, num_past + num_head)
    o = _attend_after_state(q[:, :num_head], keys[:, seen], values[:, seen], state, scale)
    if num_head < T:  # the tokens from W on, whose windows no longer reach into the state
        rest = _attend_in_blocks(q[:, num_head:], k, v, num_head, scale)
        o = torch.cat([o, rest], dim=1)

    if window_size is not None:
        # A copy: a view would keep the keys of every token alive.
        start = max(0, num_past + T - (window_size - 1))
        keys, values = keys[:, start:].clone(), values[:, start:].clone()
    return o, replace(state, keys=keys, values=values, num_tokens=state.num_tokens + T)


def _attend_after_state(
    q: Float[Tensor, "B T H K"],
    keys: Float[Tensor, "B P G K"],
    values: Float[Tensor, "B P G V"],
    state: KVState,
    scale: float | None,
) -> Float[Tensor, "B T H V"]:
    """Attention of the first ``T`` tokens, at most a window, to the state and themselves."""
    T, num_keys = q.shape[1], keys.shape[1]
    if T == 0:
        return q.new_zeros(*q.shape[:3], values.shape[-1])
    if state.ragged:
        seen = causal_mask(T, num_keys, state.window_size, q.device)
        own = F.pad(state.held_by_row(), (0, T), value=True)
        return _attend(q, keys, values, scale, mask=seen & own[:, None, None])
    if T == 1:  # sees every key there is: a windowed state holds at most W - 1
        return _attend(q, keys, values, scale)
    if num_keys == T:  # nothing held, and at most a window of tokens: plain causal attention
        return _attend(q, keys, values, scale, is_causal=True)
    mask = causal_mask(T, num_keys, state.window_size, q.device)
    return _attend(q, keys, values, scale, mask=mask)


def _attend_in_blocks(
    q: Float[Tensor, "B R H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    window_size: int,
    scale: float | None,
) -> Float[Tensor, "B R H V"]:
    """Attention of the tokens after the first ``W``: a block sees itself and the one before."""
    B, R = q.shape[:2]
    num_blocks = -(-R // window_size)
    # Zeros after the last token fill the last block; no real query sees them.
    fill = (0, 0, 0, 0, 0, num_blocks * window_size - R)

    def in_blocks(x: Tensor) -> Tensor:
        return F.pad(x, fill).unflatten(1, (-1, window_size))

    def in_pairs(x: Tensor) -> Tensor:
        blocks = in_blocks(x)
        return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2).flatten(0, 1)

    mask = causal_mask(window_size, 2 * window_size, window_size, q.device)
    o = _attend(in_blocks(q).flatten(0, 1), in_pairs(k), in_pairs(v), scale, mask=mask)
    return o.unflatten(0, (B, num_blocks)).flatten(1, 2)[:, :R]


def _attend(
    q: Float[Tensor, "B Q H K"],
    k: Float[Tensor, "B P G K"],
    v: Float[Tensor, "B P G V"],
    scale: float | None,
    *,
    mask: Bool[Tensor, "..."] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "B Q H V"]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return o.transpose(1, 2)


def causal_mask(
    num_queries: int, num_keys: int, window_size: int | None, device: torch.device
) -> Bool[Tensor, "Q P"]:
    """Which keys the last ``num_queries`` of ``num_keys`` tokens see."""
    places = torch.arange(num_keys, device=device)
    distance = places[num_keys - num_queries :, None] - places
    seen = distance >= 0
    return seen if window_size is None else seen & (distance < window_size)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, window_size: int | None) -> None:
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
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size must be at least 1, got {window_size}")


def _check_state(state: KVState, k: Tensor, v: Tensor, window_size: int | None) -> None:
    if state.num_rows != k.shape[0]:
        raise ValueError(
            f"state must have one row a sequence, {k.shape[0]} here, got {state.num_rows}"
        )
    if state.window_size != window_size:
        raise ValueError(
            f"state must be of window_size {window_size}, got one of {state.window_size}"
        )
    for name, old, new in (("keys", state.keys, k), ("values", state.values, v)):
        if old.shape[2:] != new.shape[2:]:
            raise ValueError(
                f"state must hold {name} of heads and dim {tuple(new.shape[2:])}, "
                f"got {tuple(old.shape[2:])}"
            )
