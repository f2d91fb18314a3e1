"""What every sequence mixer is: a causal map over tokens that carries its past in a state.

One class, one file, one line in the registry (:mod:`ovq.layers.registry`). The contract below is
held by one test suite that runs over every registry entry.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

State = TypeVar("State", bound="MixerState")


@runtime_checkable
class MixerConfig(Protocol):
    """The fields of a model's configuration that mixers read, in Hugging Face's words."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    window_size: int
    rope_theta: float
    use_short_conv: bool
    dictionary: dict


@runtime_checkable
class MixerState(Protocol):
    """What a mixer remembers of the tokens so far; an immutable value, one row a sequence."""

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        ...

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Tokens seen so far by each row, ``[B]`` int64."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors held."""
        ...

    @classmethod
    def concat(cls: type[State], states: Sequence[State]) -> State:
        """One state with the rows of several, in order, of however many tokens each."""
        ...

    def select_rows(self, rows: Int[Tensor, " R"]) -> "MixerState":
        """The state with its rows picked (and repeated) by index, as beam search needs it."""
        ...

    def detach(self) -> "MixerState":
        """The same numbers, cut from the autograd graph."""
        ...

    def to(self, device: torch.device | str) -> "MixerState":
        """The same state on another device."""
        ...


class Mixer(nn.Module, ABC):
    """A causal sequence mixer: hidden states to hidden states of the same shape, and its state.

    The contract: cutting a sequence anywhere and carrying the state gives the outputs of one call;
    outputs ignore later tokens; rows do not see each other; the incoming state is never changed.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "Mixer":
        """The mixer that a model of this configuration has at layer ``layer_idx``."""

    def init_parameters(self) -> None:
        """Set the mixer's own parameters, other than those of its submodules, to starting values.

        Through ``torch.nn.init`` only: loading a checkpoint guards those functions, so that trained
        parameters are kept.
        """

    @abstractmethod
    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Mix the tokens.

        Args:
            hidden_states: ``[B, T, D]``.
            state: what came before, as an earlier call returned it; ``None`` at the start.

        Returns:
            The mixed hidden states ``[B, T, D]`` in the input's dtype, and the state after them.
        """

    @abstractmethod
    def init_state(self, batch_size: int) -> MixerState:
        """The state before the first token, on the device and in the dtype of the parameters."""

    @abstractmethod
    def state_size(self, num_tokens: int) -> int:
        """Bytes that the state of one row holds after ``num_tokens`` tokens: a figure, exact."""
