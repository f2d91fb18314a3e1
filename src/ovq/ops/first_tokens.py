"""The first tokens of a sequence, kept exact for good beside a memory of the others.

Attention trained with softmax puts much weight on the first few tokens whatever they say, so that
a window which lets go of them ruins a trained model ("Efficient Streaming Language Models with
Attention Sinks", arXiv 2309.17453).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.state import working_dtype
from ovq.ops.rotary import rotate

State = TypeVar("State", bound="FirstTokensState")

# Reads the tokens after the first: their queries, scaled, keys and values, and the memory before
# them, to the output, its log-sum-exp, and the memory after.
ReadRest = Callable[
    [Tensor, Tensor, Tensor, Any],
    tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"], Any],
]


@dataclass(frozen=True, kw_only=True)
class FirstTokensState:
    """The first tokens and a memory of those after them, an immutable value, one row a sequence.

    Attributes:
        first_keys: ``[B, S, G, K]``, the keys of the first tokens before rotation, zeros past
            ``num_first``.
        first_values: ``[B, S, G, V]``.
        num_first: ``[B]`` int64, first tokens seen, at most ``S``.
        memory: the state of the tokens after them.
    """

    first_keys: Float[Tensor, "B S G K"]
    first_values: Float[Tensor, "B S G V"]
    num_first: Int[Tensor, " B"]
    memory: Any

    @classmethod
    def around(
        cls: type[State], memory: Any, keys_like: Tensor, sizes: tuple[int, int, int, int]
    ) -> State:
        """No token yet: an empty memory, and sizes ``(S, G, K, V)`` in the dtype of a tensor."""
        S, G, K, V = sizes
        B = memory.num_rows
        return cls(
            first_keys=keys_like.new_zeros(B, S, G, K),
            first_values=keys_like.new_zeros(B, S, G, V),
            num_first=torch.zeros_like(memory.num_tokens),
            memory=memory,
        )

    @classmethod
    def concat(cls: type[State], states: Sequence[State]) -> State:
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or their sizes differ.
        """
        if not states:
            raise ValueError("states must hold at least one state, got none")
        if len({state.first_keys.shape[1] for state in states}) > 1:
            raise ValueError("states must share one number of first tokens")
        memory = type(states[0].memory).concat([state.memory for state in states])
        joined = {
            name: torch.cat([getattr(state, name) for state in states]) for name in _FIRST_TENSORS
        }
        return cls(memory=memory, **joined)

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.num_first)

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Tokens seen by each row, ``[B]`` int64."""
        return self.num_first + self.memory.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors; those of the first tokens are there from the start."""
        first = (getattr(self, name) for name in _FIRST_TENSORS)
        return self.memory.num_bytes + sum(t.numel() * t.element_size() for t in first)

    def select_rows(self: State, rows: Int[Tensor, " R"]) -> State:
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self._with(
            self.memory.select_rows(rows),
            lambda tensor: tensor.index_select(0, rows.to(tensor.device)),
        )

    def detach(self: State) -> State:
        """The same numbers, cut from the autograd graph."""
        return self._with(self.memory.detach(), lambda tensor: tensor.detach())

    def to(self: State, device: torch.device | str) -> State:
        """The same state on another device."""
        return self._with(self.memory.to(device), lambda tensor: tensor.to(device))

    def _with(self: State, memory: Any, function: Callable[[Tensor], Tensor]) -> State:
        first = {name: function(getattr(self, name)) for name in _FIRST_TENSORS}
        return replace(self, memory=memory, **first)


_FIRST_TENSORS = ("first_keys", "first_values", "num_first")


def attend_with_first_tokens(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: float,
    state: State,
    read_rest: ReadRest,
    *,
    rope_theta: float,
    max_position: int,
) -> tuple[Float[Tensor, "B T H V"], State]:
    """One softmax over the first ``S`` tokens and over what the memory has of the others.

    The first tokens stand at positions ``0`` to ``S - 1`` and are read by a query as if it stood at
    ``min(i, max_position)``, so that no distance is longer than those of training.

    Args:
        q: queries ``[B, T, H, K]`` before rotation.
        k: keys ``[B, T, G, K]`` before rotation; ``G`` divides ``H``.
        v: values ``[B, T, G, V]``.
        beta: inverse temperature.
        state: what came before. It is not changed.
        read_rest: reads the memory of the tokens after the first.
        rope_theta: base of the rotary frequencies.
        max_position: the last position from which the first tokens are read.

    Returns:
        Output ``[B, T, H, V]`` in the dtype of ``q``, and the state.
    """
    S = state.first_keys.shape[1]
    num_new = (S - state.num_first).clamp_max(q.shape[1])  # first tokens among these, by row
    kinds = num_new.unique().tolist()
    if len(kinds) > 1:  # rows of unlike numbers of first tokens are run apart
        apart = [(num_new == kind).nonzero().flatten() for kind in kinds]
        parts = [
            attend_with_first_tokens(
                q[rows], k[rows], v[rows], beta, state.select_rows(rows), read_rest,
                rope_theta=rope_theta, max_position=max_position,
            )
            for rows in apart
        ]  # fmt: skip
        order = torch.cat(apart).argsort()
        o = torch.cat([part[0] for part in parts])[order]
        return o, type(state).concat([part[1] for part in parts]).select_rows(order)
    n, dtype = (kinds[0] if kinds else 0), working_dtype(q.dtype)
    places = state.num_tokens[:, None] + torch.arange(q.shape[1], device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        state = _with_more(state, k[:, :n], v[:, :n])
        scaled = q.to(dtype) * beta
        near = rotate(scaled, places.clamp_max(max_position)[..., None], rope_theta)
        o_first, lse_first = _read_first(near, places, state, rope_theta)
        o_rest, lse_rest, memory = read_rest(scaled[:, n:], k[:, n:], v[:, n:], state.memory)
        lse_rest = F.pad(lse_rest, (0, 0, n, 0), value=-torch.inf)
        o_rest = F.pad(o_rest, (0, 0, 0, 0, n, 0))
        weight = (lse_rest - torch.logaddexp(lse_first, lse_rest)).exp()[..., None]
        o = o_rest * weight + o_first * (1 - weight)
    return o.to(q.dtype), replace(state, memory=memory)


def _with_more(state: State, keys: Tensor, values: Tensor) -> State:
    """The state with further first tokens, of rows that have equally many."""
    if not keys.shape[1] or not len(keys):
        return state
    start = int(state.num_first[0])

    def joined(held: Tensor, new: Tensor) -> Tensor:
        after = held[:, start + new.shape[1] :]
        return torch.cat([held[:, :start], new.to(held.dtype), after], dim=1)

    return replace(
        state,
        first_keys=joined(state.first_keys, keys),
        first_values=joined(state.first_values, values),
        num_first=state.num_first + keys.shape[1],
    )


def _read_first(
    near: Float[Tensor, "B T H K"],
    places: Int[Tensor, "B T"],
    state: FirstTokensState,
    rope_theta: float,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B T H"]]:
    """Attention of rotated queries at these places to the first tokens; output, log-sum-exp."""
    S, G = state.first_keys.shape[1:3]
    if S == 0:
        shape = near.shape[:3]
        o = near.new_zeros(*shape, state.first_values.shape[-1])
        return o, near.new_full(shape, -torch.inf)
    own = torch.arange(S, device=near.device)
    keys = rotate(state.first_keys.to(near.dtype), own[:, None], rope_theta)
    logits = torch.einsum("btgjk,bsgk->btgjs", near.unflatten(2, (G, -1)), keys)
    later = own > places[..., None]  # [B, T, S]
    logits = logits.masked_fill(later[:, :, None, None], -torch.inf)
    o = torch.einsum("btgjs,bsgv->btgjv", logits.softmax(-1), state.first_values.to(near.dtype))
    return o.flatten(2, 3), logits.logsumexp(-1).flatten(2, 3)
