"""A rotary window, the first tokens, and beyond them an OVQ dictionary, in one softmax.

For attention that was trained with rotary positions and is to run in constant memory: the window
and the first few tokens are attended to as that attention would, and what leaves the window joins a
dictionary that OVQ learns of keys without a position, read as if it were ``distance`` tokens away.
This project's own; :func:`ovq.ops.ovq_attention.ovq_attention` is the paper's operator.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.ops.first_tokens import FirstTokensState, attend_with_first_tokens
from ovq.ops.ovq_attention import reference
from ovq.ops.ovq_attention.chunk_grid import Chunk, ChunkGrid
from ovq.ops.ovq_attention.chunked import (
    absorb,
    by_group,
    flat_list,
    from_groups,
    pick,
    read_keys,
    with_tail,
)
from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.ovq_attention.state import OVQState, working_dtype
from ovq.ops.rotary import rotate


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Where tokens are read.

    Attributes:
        rope_theta: base of the rotary frequencies.
        distance: of every slot of the dictionary, in tokens before the query.
        max_position: the last position from which the first tokens are read, say the last of those
            that a model was trained on.
    """

    rope_theta: float
    distance: int
    max_position: int

    def __post_init__(self):
        if not 0.0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta must be above 0 and finite, got {self.rope_theta}")
        for name in ("distance", "max_position"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class WindowedOVQState(FirstTokensState):
    """What the operator remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        first_keys: ``[B, S, G, K]``, the keys of the first tokens before rotation, zeros past
            ``num_first``.
        first_values: ``[B, S, G, V]``.
        num_first: ``[B]`` int64, first tokens seen, at most ``S``.
        memory: dictionary, window and unfinished chunk of the tokens after them, before rotation.
    """

    memory: OVQState

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        dictionary: DictionaryConfig,
        num_first_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "WindowedOVQState":
        """The state before the first token, in float64 if ``dtype`` is, in float32 otherwise."""
        memory = OVQState.empty(
            num_rows, num_kv_heads, key_dim, value_dim,
            dictionary=dictionary, dtype=dtype, device=device,
        )  # fmt: skip
        sizes = (num_first_tokens, num_kv_heads, key_dim, value_dim)
        return cls.around(memory, memory.key_means, sizes)


def windowed_ovq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: float,
    bias: Float[Tensor, " H"],
    state: WindowedOVQState | None = None,
    *,
    dictionary: DictionaryConfig,
    num_first_tokens: int,
    positions: Positions,
) -> tuple[Float[Tensor, "B T H V"], WindowedOVQState]:
    """One softmax over the first tokens, a window with rotary positions, and a dictionary.

    Chunks are counted from the token after the first ``S``. Token ``i`` of a chunk sees::

        beta rot(q_i, min(i, max_position) - j) . k_j    for the first tokens j <= i
        beta rot(q_i, i - j) . k_j                       for j <= i in window and chunk
        beta rot(q_i, distance) . D_k[m] + log c[m] + bias   for active slots m

    Args:
        q: queries ``[B, T, H, K]`` before rotation.
        k: keys ``[B, T, G, K]`` before rotation; ``G`` divides ``H``.
        v: values ``[B, T, G, V]``.
        beta: inverse temperature, say ``K^-1/2``.
        bias: added to the logits of each query head over the dictionary, ``[H]``; minus infinity
            leaves the dictionary out.
        state: what came before; ``None`` at the start. It is not changed.
        dictionary: how the dictionary is learned; its ``window_size`` is the window.
        num_first_tokens: ``S``, at least 0, tokens that stay exact for good.
        positions: where all of these are read.

    Returns:
        Output ``[B, T, H, V]`` in the dtype of ``q``, and the state.

    Raises:
        ValueError: shapes that do not fit, an odd ``K``, a negative ``num_first_tokens``, or a
            state made with other numbers.

    Example:
        >>> q = torch.randn(1, 50, 4, 8)
        >>> k = v = torch.randn(1, 50, 2, 8)
        >>> dictionary = DictionaryConfig(num_centroids=8, chunk_size=4, window_size=8)
        >>> positions = Positions(rope_theta=10000.0, distance=20, max_position=100)
        >>> options = {"dictionary": dictionary, "num_first_tokens": 2, "positions": positions}
        >>> o, state = windowed_ovq_attention(q, k, v, 0.35, torch.zeros(4), **options)
        >>> tuple(o.shape), state.num_tokens.tolist()
        ((1, 50, 4, 8), [50])
    """
    _check(q, k, v, bias, num_first_tokens)
    sizes = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if state is None:
        state = WindowedOVQState.empty(
            *sizes, dictionary=dictionary, num_first_tokens=num_first_tokens, dtype=q.dtype,
            device=q.device,
        )  # fmt: skip
    else:
        _check_state(state, sizes, dictionary, num_first_tokens)
    working = working_dtype(q.dtype)

    def read_rest(q, k, v, memory):
        return _read_rest(q, k.to(q.dtype), v.to(q.dtype), bias.to(working), memory, positions)

    return attend_with_first_tokens(
        q, k, v, beta, state, read_rest,
        rope_theta=positions.rope_theta, max_position=positions.max_position,
    )  # fmt: skip


def _read_rest(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    bias: Float[Tensor, " H"],
    memory: OVQState,
    positions: Positions,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"], OVQState]:
    """Attention of the tokens after the first to window, chunk and dictionary."""
    config, G = memory.dictionary, k.shape[2]
    grid = ChunkGrid.of(q.shape[0], q.shape[1], memory.tail_length, None, config)
    before, C = grid.num_tail_places, config.chunk_size
    flat_q = flat_list(None, q, q.dtype)
    flat_k, flat_v = (
        flat_list(tail, new, q.dtype)
        for tail, new in ((memory.tail_keys, k), (memory.tail_values, v))
    )
    places, outputs, lses = [], [], []
    if not torch.is_grad_enabled() and bool((grid.num_full > 0).any()):
        memory = memory.map(torch.clone)  # ours, so that absorb may write into it
    for chunk in grid.chunks():
        keys, values = (flat[chunk.keys].movedim(2, 1) for flat in (flat_k, flat_v))
        queries = by_group(flat_q[chunk.queries - before], G)
        o, lse = _read_chunk(queries, keys, values, bias, chunk, memory, positions)
        places.append((chunk.queries - before).flatten())
        outputs.append(from_groups(o).flatten(0, 1))
        lses.append(from_groups(lse).flatten(0, 1))
        if len(chunk.leaving):
            tokens = (keys[chunk.leaving, :, :C], values[chunk.leaving, :, :C])
            memory, _ = absorb(memory, chunk.rows[chunk.leaving], *tokens, None)
    memory = with_tail(memory, grid, flat_k, flat_v)
    o, lse = flat_q.new_zeros(*flat_q.shape[:2], v.shape[-1]), flat_q.new_zeros(flat_q.shape[:2])
    if places:
        index = torch.cat(places)
        o, lse = o.index_put((index,), torch.cat(outputs)), lse.index_put((index,), torch.cat(lses))
    return o[:-1].view(*q.shape[:3], v.shape[-1]), lse[:-1].view(q.shape[:3]), memory


def _read_chunk(
    queries: Float[Tensor, "r G J w K"],
    keys: Float[Tensor, "r G E K"],
    values: Float[Tensor, "r G E V"],
    bias: Float[Tensor, " H"],
    chunk: Chunk,
    memory: OVQState,
    positions: Positions,
) -> tuple[Float[Tensor, "r G J w V"], Float[Tensor, "r G J w"]]:
    """One softmax over the dictionary and the exact tokens of a chunk's window."""
    n = int(pick(memory.num_active, chunk.rows).max())
    key_means, value_means, counts = (
        pick(tensor, chunk.rows)[:, :, :n]
        for tensor in (memory.key_means, memory.value_means, memory.counts)
    )
    theta = positions.rope_theta
    far = rotate(queries, torch.tensor(positions.distance, device=queries.device), theta)
    near = rotate(queries, chunk.query_places[:, None, None], theta)
    exact = rotate(keys, chunk.key_places, theta)
    over_exact = torch.einsum("rgjwk,rgek->rgjwe", near, exact)
    over_exact = over_exact.masked_fill(~chunk.visible[:, None, None], -torch.inf)
    centroids = read_keys(key_means, memory.dictionary)
    over_dictionary = torch.einsum("rgjwk,rgnk->rgjwn", far, centroids)
    over_dictionary = over_dictionary + counts.to(far.dtype).log()[:, :, None, None]
    over_dictionary = over_dictionary + bias.unflatten(0, (counts.shape[1], -1))[..., None, None]
    logits = torch.cat([over_dictionary, over_exact], dim=-1)
    most = logits.amax(-1, keepdim=True)
    weights = (logits - most).exp()  # once, for the output and for the sum
    total = weights.sum(-1, keepdim=True)
    o = torch.einsum("rgjwn,rgnv->rgjwv", weights[..., :n], value_means)
    o = o + torch.einsum("rgjwe,rgev->rgjwv", weights[..., n:], values)
    return o / total, (most + total.log())[..., 0]


def windowed_ovq_by_tokens(
    q: Float[Tensor, "T J K"],
    k: Float[Tensor, "T K"],
    v: Float[Tensor, "T V"],
    beta: float,
    bias: Float[Tensor, " J"],
    dictionary: DictionaryConfig,
    num_first_tokens: int,
    positions: Positions,
) -> Float[Tensor, "T J V"]:
    """One sequence and one key-value head, token by token: the oracle of the operator above."""
    S, C, W = num_first_tokens, dictionary.chunk_size, dictionary.window_size
    theta = positions.rope_theta
    head = reference.HeadDictionary(k[:0], v[:0], torch.zeros(0, dtype=torch.int64))
    outputs, absorbed = [], 0
    for i in range(len(k)):
        start = S + (i - S) // C * C  # of the chunk
        if i > S and (i - S) % C == 0 and start - C - W >= S:  # a chunk has left the window
            leaving = slice(start - C - W, start - W)
            absorbed += C
            num_new = dictionary.num_active_after(len(head.counts), absorbed) - len(head.counts)
            keys, values, random = k[leaving], v[leaving], torch.zeros(C, dtype=k.dtype)
            seeds = reference.choose_seeds(keys, head, num_new, dictionary, random)
            slots = reference.assign_to_centroids(keys, head, seeds, dictionary)
            head = reference.update(head, keys, values, slots, dictionary)
        first = range(min(S, i + 1))
        exact = range(max(S, start - W), i + 1)
        apart = [min(i, positions.max_position) - j for j in first] + [i - j for j in exact]
        kept = [*first, *exact]
        every = q[i][:, None].expand(-1, len(kept), -1)  # [J, s, K]
        turned = rotate(every, torch.tensor(apart), theta)
        far = rotate(q[i], torch.tensor(positions.distance), theta)
        logits = torch.cat(
            [
                beta * far @ reference.read_keys(head.keys, dictionary).mT
                + head.counts.to(beta * far).log()
                + bias[:, None],
                beta * (turned * k[kept]).sum(-1),
            ],
            dim=-1,
        )
        outputs.append(logits.softmax(-1) @ torch.cat([head.values, v[kept]]))
    return torch.stack(outputs)


def _check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, num_first_tokens: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(
                f"{name} must be a floating-point tensor of 4 axes in the dtype of q, got "
                f"{x.dtype} {tuple(x.shape)}"
            )
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or q.shape[3] % 2:
        raise ValueError(
            f"k must share B, T and an even K with q {tuple(q.shape)}, got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must share B, T and G with k {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k must have a number of heads G that divides H = {q.shape[2]}, got {k.shape[2]}"
        )
    if bias.shape != (q.shape[2],):
        raise ValueError(f"bias must be [H] = [{q.shape[2]}], got {tuple(bias.shape)}")
    if num_first_tokens < 0:
        raise ValueError(f"num_first_tokens must be at least 0, got {num_first_tokens}")


def _check_state(
    state: WindowedOVQState,
    sizes: tuple[int, int, int, int],
    dictionary: DictionaryConfig,
    num_first_tokens: int,
) -> None:
    memory = state.memory
    if memory.dictionary != dictionary:
        raise ValueError(
            f"state must be made with the dictionary of this call, {dictionary}, got one made with "
            f"{memory.dictionary}"
        )
    held = (*memory.key_means.shape[:2], memory.key_means.shape[3], memory.value_means.shape[3])
    if held != sizes or state.first_keys.shape[1] != num_first_tokens:
        raise ValueError(
            f"state must have [rows, G, K, V] = {list(sizes)} and {num_first_tokens} first tokens "
            f"for these inputs, got {list(held)} and {state.first_keys.shape[1]}"
        )
