"""What every sequence mixer is: a causal map over tokens that carries its past in a state.

One class, one file, one line in the registry (:mod:`ovq.layers.registry`). The contract below is
held by one test suite that runs over every registry entry.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

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
    num_codes: int
    block_size: int
    expand_v: float
    ssm_state_size: int
    ssm_expand: float


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
    outputs ignore later tokens; rows do not see each other; the incoming state is never changed. A
    forward changes no parameter and no buffer.

    Attributes:
        gathers_statistics: whether the mixer learns from the tokens of training forwards by other
            means than gradients. A model then calls :meth:`begin_training_forward` before its
            layers run in training and :meth:`end_training_forward` after, and leaves no padding in
            place.
    """

    gathers_statistics: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "Mixer":
        """The mixer that a model of this configuration has at layer ``layer_idx``."""

    def init_parameters(self) -> None:
        """Set the mixer's own parameters, other than those of its submodules, to starting values.

        Through ``torch.nn.init`` only: loading a checkpoint guards those functions, so that trained
        parameters are kept.
        """

    def begin_training_forward(self) -> None:
        """Use what was gathered so far; nothing changes again until the next call.

        Not called again where the backward repeats a forward, as gradient checkpointing does.
        """

    def end_training_forward(self) -> None:
        """Keep what the forward gathered since :meth:`begin_training_forward`."""

    def auxiliary_loss(self) -> Float[Tensor, ""] | None:
        """What the last training forward adds to a model's loss, as a mean over its tokens.

        It is read once, right after the forward, and then forgotten; ``None`` if there is none.
        """
        return None

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
