"""Mixers with one memory of constant size behind a short convolution, and their state."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.layers.base import Mixer, check_hidden_states, check_sizes, check_state
from ovq.layers.short_conv import ShortConvolution

# Of the public implementations, whose checkpoints expect it.
UNIT_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """What the layer remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        memory: ``[B, H, K, V]`` in float32, in float64 with float64 inputs.
        conv_inputs: ``[B, P, F]``, the last inputs of the short convolution.
        num_tokens: ``[B]`` int64, tokens seen by each row.
    """

    memory: Float[Tensor, "B H K V"]
    conv_inputs: Float[Tensor, "B P F"]
    num_tokens: Int[Tensor, " B"]

    @classmethod
    def concat(cls, states: Sequence["RecurrentState"]) -> "RecurrentState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or states of different layers.
        """
        shapes = {(state.memory.shape[1:], state.conv_inputs.shape[1:]) for state in states}
        if len(shapes) != 1:
            rows = [tuple(map(tuple, shape)) for shape in shapes]
            raise ValueError(f"states must share one shape of their rows, got {sorted(rows)}")
        return cls(
            memory=torch.cat([state.memory for state in states]),
            conv_inputs=torch.cat([state.conv_inputs for state in states]),
            num_tokens=torch.cat([state.num_tokens for state in states]),
        )

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return self.memory.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors held."""
        tensors = (self.memory, self.conv_inputs, self.num_tokens)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def select_rows(self, rows: Int[Tensor, " R"]) -> "RecurrentState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "RecurrentState":
        """The same numbers, cut from the autograd graph."""
        return self._map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "RecurrentState":
        """The same state on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RecurrentState":
        return type(self)(
            memory=function(self.memory),
            conv_inputs=function(self.conv_inputs),
            num_tokens=function(self.num_tokens),
        )


class RecurrentMixer(Mixer):
    """A mixer with one memory ``[K, V]`` for each head, behind a short convolution. Abstract.

    A subclass makes ``short_conv``, says how large its memory is, in :attr:`memory_shape`, and how
    tokens mix, in :meth:`mix`.

    Args:
        hidden_size: ``D``.

    Raises:
        ValueError: ``D`` below 1.
    """

    short_conv: ShortConvolution

    def __init__(self, hidden_size: int):
        super().__init__()
        check_sizes(hidden_size=hidden_size)
        self.hidden_size = hidden_size

    @property
    @abstractmethod
    def memory_shape(self) -> tuple[int, int, int]:
        """``H``, ``K`` and ``V`` of the memory."""

    @abstractmethod
    def mix(
        self,
        hidden_states: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B H K V"],
        conv_inputs: Float[Tensor, "B P F"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H K V"], Float[Tensor, "B P F"]]:
        """What the tokens become, and the memory and convolution inputs after them."""

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: RecurrentState | None = None
    ) -> tuple[Float[Tensor, "B T D"], RecurrentState]:
        """Mix the tokens.

        Raises:
            ValueError: hidden states that do not fit, or a state of another kind, batch size,
                device or layer.
        """
        check_hidden_states(hidden_states, self.hidden_size)
        initial = self.init_state(len(hidden_states))
        if initial.memory.device != hidden_states.device:
            raise ValueError(
                f"hidden_states must be on the device of the weights, which must not be offloaded, "
                f"got {hidden_states.device}, weights on {initial.memory.device}"
            )
        if state is None:
            state = initial
        check_state(state, RecurrentState, hidden_states)
        _check_parts(state, initial)
        output, memory, conv_inputs = self.mix(hidden_states, state.memory, state.conv_inputs)
        num_tokens = state.num_tokens + hidden_states.shape[1]
        return output, RecurrentState(memory=memory, conv_inputs=conv_inputs, num_tokens=num_tokens)

    def init_state(self, batch_size: int) -> RecurrentState:
        """The state before the first token, on the device of the parameters."""
        weight = self.short_conv.weight
        working = torch.promote_types(weight.dtype, torch.float32)
        return RecurrentState(
            memory=weight.new_zeros(batch_size, *self.memory_shape, dtype=working),
            conv_inputs=self.short_conv.init_state(batch_size),
            num_tokens=weight.new_zeros(batch_size, dtype=torch.int64),
        )

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: the same number after any number of tokens."""
        return self.init_state(1).num_bytes


def smooth_unit_norm(x: Float[Tensor, "*shape K"]) -> Float[Tensor, "*shape K"]:
    """``x / sqrt(|x|^2 + 1e-6)`` over the last axis: its gradient stays bounded at zero."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_NORM_EPS)


def _check_parts(state: RecurrentState, initial: RecurrentState) -> None:
    for name in ("memory", "conv_inputs"):
        wanted, got = getattr(initial, name).shape, getattr(state, name).shape
        if got != wanted:
            raise ValueError(f"state must hold {name} {tuple(wanted)} here, got {tuple(got)}")
