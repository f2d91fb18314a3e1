"""Linear attention: softmax left out, so that all of the past is one matrix per head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.decay import without_autocast
from ovq.ops.inputs import check_inputs

SMALLEST_NORMALIZER = 1e-6


@dataclass(frozen=True, kw_only=True)
class LinearAttentionState:
    """The sum of ``k v^T`` over the tokens so far, an immutable value with one row a sequence.

    Attributes:
        sums: ``[B, G, K, V]`` float32, float64 for float64 inputs. With the normaliser the values
            have a further component that is always 1, and ``sums`` is ``[B, G, K, V + 1]``: its
            last column is the sum of the keys.
        num_tokens: ``[B]`` int64, tokens seen by each row.
    """

    sums: Float[Tensor, "B G K V"]
    num_tokens: Int[Tensor, " B"]

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        normalize: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearAttentionState":
        """The state before the first token, in float64 if ``dtype`` is, in float32 otherwise."""
        shape = (num_rows, num_kv_heads, key_dim, value_dim + normalize)
        working = torch.promote_types(dtype, torch.float32)
        return cls(
            sums=torch.zeros(shape, dtype=working, device=device),
            num_tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )

    @classmethod
    def concat(cls, states: Sequence["LinearAttentionState"]) -> "LinearAttentionState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or their heads and dimensions differ.
        """
        shapes = {tuple(state.sums.shape[1:]) for state in states}
        if len(shapes) != 1:
            raise ValueError(f"states must share one shape of their rows, got {sorted(shapes)}")
        return cls(
            sums=torch.cat([state.sums for state in states]),
            num_tokens=torch.cat([state.num_tokens for state in states]),
        )

    @property
    def num_rows(self) -> int:
        """Number of sequences ``B``."""
        return self.sums.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors: the same number after any number of tokens."""
        tensors = (self.sums, self.num_tokens)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def select_rows(self, rows: Int[Tensor, " R"]) -> "LinearAttentionState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "LinearAttentionState":
        """The same numbers, cut from the autograd graph."""
        return self._map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "LinearAttentionState":
        """The same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "LinearAttentionState":
        return replace(self, sums=function(self.sums), num_tokens=function(self.num_tokens))


def linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    state: LinearAttentionState | None = None,
    *,
    normalize: bool = False,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], LinearAttentionState]:
    """Causal linear attention: ``S <- S + k v^T; o = K^-1/2 S^T q``, chunks in parallel.

    With ``normalize``, the weights are positive and sum to one as those of softmax do:
    ``o = S^T phi(q) / (z . phi(q))`` with ``phi(x) = elu(x) + 1``, ``S <- S + phi(k) v^T`` and
    ``z <- z + phi(k)``. Time is linear in ``T``; ``T / C`` matrices ``[K, V]`` per row and head are
    held while it runs.

    Args:
        q: queries ``[B, T, H, K]``.
        k: keys ``[B, T, G, K]``; ``G`` divides ``H`` (grouped queries).
        v: values ``[B, T, G, V]``.
        state: what came before; ``None`` at the start. It is not changed.
        normalize: whether ``phi`` and the normaliser are applied. It is taken as at least 1e-6.
        chunk_size: tokens ``C >= 1`` that are mixed by one masked product; no part of the
            mathematics.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the state after the last token.

    Raises:
        ValueError: shapes that do not fit, ``chunk_size < 1``, or a state of another batch size,
            other heads or the other ``normalize``.

    Example:
        >>> q = k = v = torch.randn(1, 100, 2, 4)
        >>> o, state = linear_attention(q, k, v)
        >>> tuple(o.shape), tuple(state.sums.shape)
        ((1, 100, 2, 4), (1, 2, 4, 4))

    Source: "Transformers are RNNs" (arXiv 2006.16236), equations 9-12 and 18-20; without the
    normaliser as in "Retentive Network" (arXiv 2307.08621), equation 1 without decay.
    """
    check_inputs(q, k, v)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    state = _checked_state(state, k, v, normalize)
    T, C = q.shape[1], min(chunk_size, max(1, q.shape[1]))
    num_chunks = -(-T // C)
    with without_autocast(q.device):  # it would cut the sums' float32 short
        queries, keys, values = (
            F.pad(x, (0, 0, 0, 0, 0, -T % C)).unflatten(1, (num_chunks, C))  # zeros add nothing
            for x in _features(q, k, v, normalize)
        )
        queries = queries.unflatten(3, (k.shape[2], -1))  # [B, n, C, G, J, K]
        added = torch.einsum("bncgk,bncgv->bngkv", keys, values)
        sums = torch.cat([state.sums[:, None], added], dim=1).cumsum(1)
        scores = torch.einsum("bnigjk,bncgk->bngjic", queries, keys).tril()
        from_chunk = torch.einsum("bngjic,bncgv->bnigjv", scores, values)
        from_past = torch.einsum("bnigjk,bngkv->bnigjv", queries, sums[:, :-1])
    o = (from_chunk + from_past).flatten(3, 4).flatten(1, 2)[:, :T]
    # A copy: a view would keep the sums of every chunk alive.
    after = replace(state, sums=sums[:, -1].clone(), num_tokens=state.num_tokens + T)
    return _output(o, q, normalize), after


def naive_linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    state: LinearAttentionState | None = None,
    *,
    normalize: bool = False,
) -> tuple[Float[Tensor, "B T H V"], LinearAttentionState]:
    """The same by its definition, one token at a time: the oracle.

    Raises:
        ValueError: as :func:`linear_attention`.

    Example:
        >>> q = k = v = torch.ones(1, 3, 1, 4)
        >>> naive_linear_attention(q, k, v)[0][0, :, 0, 0].tolist()  # 4^-1/2 * 4 a token
        [2.0, 4.0, 6.0]
    """
    check_inputs(q, k, v)
    state = _checked_state(state, k, v, normalize)
    queries, keys, values = _features(q, k, v, normalize)
    group = q.shape[2] // k.shape[2]
    sums, outputs = state.sums, [queries.new_zeros(*q.shape[:1], 0, q.shape[2], values.shape[3])]
    for t in range(q.shape[1]):
        sums = sums + keys[:, t, :, :, None] * values[:, t, :, None, :]
        of_query_heads = sums.repeat_interleave(group, dim=1)  # [B, H, K, V]
        outputs.append((of_query_heads.mT @ queries[:, t, :, :, None])[:, None, ..., 0])
    after = replace(state, sums=sums, num_tokens=state.num_tokens + q.shape[1])
    return _output(torch.cat(outputs, dim=1), q, normalize), after


def _features(
    q: Tensor, k: Tensor, v: Tensor, normalize: bool
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"], Float[Tensor, "B T G V"]]:
    """What enters the sums, in the working dtype: mapped, scaled, the values with their 1."""
    working = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(working) for x in (q, k, v))
    if not normalize:
        return q * q.shape[-1] ** -0.5, k, v
    return F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0)


def _output(o: Tensor, q: Tensor, normalize: bool) -> Float[Tensor, "B T H V"]:
    if normalize:
        o = o[..., :-1] / o[..., -1:].clamp_min(SMALLEST_NORMALIZER)
    return o.to(q.dtype)


def _checked_state(
    state: LinearAttentionState | None, k: Tensor, v: Tensor, normalize: bool
) -> LinearAttentionState:
    """The state given, or the empty one, if it fits."""
    (B, _, G, K), V = k.shape, v.shape[3]
    empty = LinearAttentionState.empty(
        B, G, K, V, normalize=normalize, dtype=k.dtype, device=k.device
    )
    if state is None:
        return empty
    if state.num_rows != B:
        raise ValueError(f"state must have one row a sequence, {B} here, got {state.num_rows}")
    if state.sums.shape != empty.sums.shape:
        raise ValueError(
            f"state must hold sums {tuple(empty.sums.shape[1:])} for these heads, dims and "
            f"normalize={normalize}, got {tuple(state.sums.shape[1:])}"
        )
    return replace(state, sums=state.sums.to(empty.sums.dtype))
