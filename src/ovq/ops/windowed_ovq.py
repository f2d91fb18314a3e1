"""A rotary window, the first tokens, and beyond them an OVQ dictionary, in one softmax.

For attention that was trained with rotary positions and is to run in constant memory: the window
and the first few tokens are attended to as that attention would, and what leaves the window joins a
dictionary that OVQ learns of keys without a position, read as if it were ``distance`` tokens away.
This project's own; :func:`ovq.ops.ovq_attention.ovq_attention` is the paper's operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

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
    """Where tokens are read, in tokens before the query.

    Attributes:
        rope_theta: base of the rotary frequencies.
        distance: of every slot of the dictionary.
        max_distance: the first tokens are read where they are, but never further away.
    """

    rope_theta: float
    distance: int
    max_distance: int

    def __post_init__(self):
        if not 0.0 < self.rope_theta < float("inf"):
            raise ValueError(f"rope_theta must be above 0 and finite, got {self.rope_theta}")
        for name in ("distance", "max_distance"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class WindowedOVQState:
    """What the operator remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        first_keys: ``[B, S, G, K]``, the keys of the first tokens before rotation, zeros past
            ``num_first``.
        first_values: ``[B, S, G, V]``.
        num_first: ``[B]`` int64, first tokens seen, at most ``S``.
        memory: dictionary, window and unfinished chunk of the tokens after them, before rotation.
    """

    first_keys: Float[Tensor, "B S G K"]
    first_values: Float[Tensor, "B S G V"]
    num_first: Int[Tensor, " B"]
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
        shape = (num_rows, num_first_tokens, num_kv_heads)
        like = memory.key_means
        return cls(
            first_keys=like.new_zeros(*shape, key_dim),
            first_values=like.new_zeros(*shape, value_dim),
            num_first=memory.num_active.clone(),
            memory=memory,
        )

    @classmethod
    def concat(cls, states: Sequence["WindowedOVQState"]) -> "WindowedOVQState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or their configurations differ.
        """
        if len({state.first_keys.shape[1] for state in states}) > 1:
            raise ValueError("states must share one number of first tokens")
        memory = OVQState.concat([state.memory for state in states])
        joined = {
            name: torch.cat([getattr(state, name) for state in states]) for name in _FIRST_TENSORS
        }
        return cls(memory=memory, **joined)

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return self.memory.num_rows

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Tokens seen by each row, ``[B]`` int64."""
        return self.num_first + self.memory.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors: the same number from the first token on."""
        first = (getattr(self, name) for name in _FIRST_TENSORS)
        return self.memory.num_bytes + sum(t.numel() * t.element_size() for t in first)

    def select_rows(self, rows: Int[Tensor, " R"]) -> "WindowedOVQState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "WindowedOVQState":
        """The same numbers, cut from the autograd graph."""
        return self.map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "WindowedOVQState":
        """The same state on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "WindowedOVQState":
        """The state with a function applied to each tensor."""
        first = {name: function(getattr(self, name)) for name in _FIRST_TENSORS}
        return replace(self, memory=self.memory.map(function), **first)


_FIRST_TENSORS = tuple(field.name for field in fields(WindowedOVQState) if field.name != "memory")


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

        beta rot(q_i, min(i - j, max_distance)) . k_j    for the first tokens j <= i
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
        >>> positions = Positions(rope_theta=10000.0, distance=20, max_distance=100)
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
    num_new = (num_first_tokens - state.num_first).clamp_max(q.shape[1])  # first tokens, by row
    kinds = num_new.unique().tolist()
    if len(kinds) > 1:  # rows of unlike numbers of first tokens are run apart
        apart = [(num_new == kind).nonzero().flatten() for kind in kinds]
        parts = [
            windowed_ovq_attention(
                q[rows], k[rows], v[rows], beta, bias, state.select_rows(rows),
                dictionary=dictionary, num_first_tokens=num_first_tokens, positions=positions,
            )
            for rows in apart
        ]  # fmt: skip
        order = torch.cat(apart).argsort()
        o = torch.cat([part[0] for part in parts])[order]
        return o, WindowedOVQState.concat([part[1] for part in parts]).select_rows(order)
    return _attend(q, k, v, beta, bias, state, kinds[0] if kinds else 0, positions)


def _attend(q, k, v, beta, bias, state, num_new, positions) -> tuple[Tensor, WindowedOVQState]:
    """Attention of rows that all take ``num_new`` of these tokens among their first."""
    dtype = working_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        q32, k32, v32 = q.to(dtype) * beta, k.to(dtype), v.to(dtype)
        before = state.num_tokens
        state = _with_first(state, k32[:, :num_new], v32[:, :num_new])
        o_first, lse_first = _read_first(q32, before, state, positions)
        o_rest, lse_rest, memory = _read_rest(
            q32[:, num_new:], k32[:, num_new:], v32[:, num_new:], bias.to(dtype), state.memory,
            positions,
        )  # fmt: skip
        lse_rest = F.pad(lse_rest, (0, 0, num_new, 0), value=-torch.inf)
        o_rest = F.pad(o_rest, (0, 0, 0, 0, num_new, 0))
        weight = (lse_rest - torch.logaddexp(lse_first, lse_rest)).exp()[..., None]
        o = o_rest * weight + o_first * (1 - weight)
    return o.to(q.dtype), replace(state, memory=memory)


def _with_first(state: WindowedOVQState, keys: Tensor, values: Tensor) -> WindowedOVQState:
    """The state with further first tokens, of rows that have equally many."""
    if not keys.shape[1] or not len(keys):
        return state
    start, S = int(state.num_first[0]), state.first_keys.shape[1]

    def joined(held: Tensor, new: Tensor) -> Tensor:
        after = held[:, start + new.shape[1] : S]
        return torch.cat([held[:, :start], new, after], dim=1)

    return replace(
        state,
        first_keys=joined(state.first_keys, keys),
        first_values=joined(state.first_values, values),
        num_first=state.num_first + keys.shape[1],
    )


def _read_first(
    q: Float[Tensor, "B T H K"],
    before: Int[Tensor, " B"],
    state: WindowedOVQState,
    positions: Positions,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"]]:
    """Attention to the first tokens alone; output and log-sum-exp."""
    B, T, H = q.shape[:3]
    S, G = state.first_keys.shape[1:3]
    places = torch.arange(S, device=q.device)
    own = before[:, None] + torch.arange(T, device=q.device)
    distance = own[..., None] - places  # [B, T, S]
    apart = distance.clamp(0, positions.max_distance)[:, :, :, None]
    turned = rotate(q[:, :, None].expand(-1, -1, S, -1, -1), apart, positions.rope_theta)
    turned = turned.unflatten(3, (G, -1))
    logits = torch.einsum("btsgjk,bsgk->btgjs", turned, state.first_keys)
    logits = logits.masked_fill(distance[:, :, None, None] < 0, -torch.inf)
    if S == 0:
        return q.new_zeros(B, T, H, state.first_values.shape[-1]), q.new_full((B, T, H), -torch.inf)
    o = torch.einsum("btgjs,bsgv->btgjv", logits.softmax(-1), state.first_values)
    return o.flatten(2, 3), logits.logsumexp(-1).flatten(2, 3)


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
    weights = logits.softmax(-1)
    o = torch.einsum("rgjwn,rgnv->rgjwv", weights[..., :n], value_means)
    o = o + torch.einsum("rgjwe,rgev->rgjwv", weights[..., n:], values)
    return o, logits.logsumexp(-1)


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
        apart = [min(i - j, positions.max_distance) for j in first] + [i - j for j in exact]
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
