"""Mixers over heads that may convolve what they project, and the state that holds both pasts."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.layers.base import MixerState
from ovq.layers.projected import ProjectedMixer
from ovq.layers.short_conv import ShortConvolution


@dataclass(frozen=True, kw_only=True)
class ConvolvedState:
    """What the mixer remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        memory: the state of the operator between the projections.
        conv_inputs: ``[B, P, F]``, the last inputs of the short convolution; ``P = 0`` without one.
    """

    memory: MixerState
    conv_inputs: Float[Tensor, "B P F"]

    @classmethod
    def concat(cls, states: Sequence["ConvolvedState"]) -> "ConvolvedState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or states that do not fit one another.
        """
        parts = {(type(state.memory), state.conv_inputs.shape[1:]) for state in states}
        if len(parts) != 1:
            found = sorted((kind.__name__, tuple(shape)) for kind, shape in parts)
            raise ValueError(
                f"states must share one kind of memory and convolution inputs, got {found}"
            )
        return cls(
            memory=type(states[0].memory).concat([state.memory for state in states]),
            conv_inputs=torch.cat([state.conv_inputs for state in states]),
        )

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return self.memory.num_rows

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Tokens seen so far by each row, ``[B]`` int64."""
        return self.memory.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors held."""
        conv_bytes = self.conv_inputs.numel() * self.conv_inputs.element_size()
        return self.memory.num_bytes + conv_bytes

    def select_rows(self, rows: Int[Tensor, " R"]) -> "ConvolvedState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        inputs = self.conv_inputs.index_select(0, rows.to(self.conv_inputs.device))
        return type(self)(memory=self.memory.select_rows(rows), conv_inputs=inputs)

    def detach(self) -> "ConvolvedState":
        """The same numbers, cut from the autograd graph."""
        return type(self)(memory=self.memory.detach(), conv_inputs=self.conv_inputs.detach())

    def to(self, device: torch.device | str) -> "ConvolvedState":
        """The same state on another device."""
        return type(self)(memory=self.memory.to(device), conv_inputs=self.conv_inputs.to(device))


class ConvolvedMixer(ProjectedMixer):
    """A mixer of constant state over heads, its projections convolved or not. Abstract.

    A subclass says how queries, keys and values mix, in :meth:`mix`, and what it remembers before
    the first token, in :meth:`empty_memory`.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``.
        head_dim: ``K = V``.
        use_short_conv: whether a causal convolution of width 4 and SiLU follow the projections.

    Raises:
        ValueError: a size below 1, or ``G`` not dividing ``H``.
    """

    state_class = ConvolvedState
    memory_class: ClassVar[type]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        use_short_conv: bool = False,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        channels = (num_heads + 2 * num_kv_heads) * head_dim
        self.short_conv = ShortConvolution(channels) if use_short_conv else None

    @abstractmethod
    def mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        memory: MixerState | None,
    ) -> tuple[Float[Tensor, "B T H V"], MixerState]:
        """The operator: what the tokens become, and what is remembered after them."""

    @abstractmethod
    def empty_memory(self, batch_size: int, device: torch.device) -> MixerState:
        """What is remembered before the first token."""

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: ConvolvedState | None = None
    ) -> tuple[Float[Tensor, "B T D"], ConvolvedState]:
        """Mix the tokens.

        Raises:
            ValueError: hidden states that do not fit, or a state of another batch size, device or
                mixer.
        """
        q, k, v, past = self.queries_keys_values(hidden_states, state)
        o, memory = self.mix(q, k, v, None if state is None else state.memory)
        output = self.merge_heads(o.to(v.dtype))
        return output, self.state_class(memory=memory, conv_inputs=past)

    def queries_keys_values(
        self, hidden_states: Float[Tensor, "B T D"], state: ConvolvedState | None = None
    ) -> tuple[
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T G K"],
        Float[Tensor, "B T G V"],
        Float[Tensor, "B P F"],
    ]:
        """What :meth:`mix` is called with.

        Returns:
            Queries, keys, values, and the last inputs of the short convolution after these tokens.

        Raises:
            ValueError: as :meth:`forward`.
        """
        projected = self.project(hidden_states, state)
        past = self._initial_conv_inputs(len(hidden_states))
        # Weights that are offloaded are elsewhere, except while their own module runs.
        past = torch.zeros_like(past, device=hidden_states.device)
        if state is not None:
            self._check_parts(state, past)
            past = state.conv_inputs
        if self.short_conv is not None:
            mixed, past = self.short_conv(torch.cat(projected, dim=-1), past)
            projected = mixed.split([x.shape[-1] for x in projected], dim=-1)
        q, k, v = (self.split_heads(x) for x in projected)
        return q, k, v, past

    def init_state(self, batch_size: int) -> ConvolvedState:
        """The state before the first token, on the device of the parameters.

        The memory is in float32, in float64 with float64 parameters.
        """
        memory = self.empty_memory(batch_size, self.k_proj.weight.device)
        return self.state_class(memory=memory, conv_inputs=self._initial_conv_inputs(batch_size))

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: the same number after any number of tokens."""
        conv_inputs = self._initial_conv_inputs(1)
        conv_bytes = conv_inputs.numel() * conv_inputs.element_size()
        return self.empty_memory(1, torch.device("meta")).num_bytes + conv_bytes

    def _initial_conv_inputs(self, batch_size: int) -> Float[Tensor, "B P F"]:
        if self.short_conv is None:
            return self.k_proj.weight.new_zeros(batch_size, 0, 0)
        return self.short_conv.init_state(batch_size)

    def _check_parts(self, state: ConvolvedState, initial: Tensor) -> None:
        if not isinstance(state.memory, self.memory_class):
            raise ValueError(
                f"state must hold a memory of class {self.memory_class.__name__}, "
                f"got {type(state.memory).__name__}"
            )
        if state.conv_inputs.shape != initial.shape:
            raise ValueError(
                f"state must hold convolution inputs {tuple(initial.shape)} for this batch and "
                f"layer, got {tuple(state.conv_inputs.shape)}"
            )
