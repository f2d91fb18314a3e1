"""What every sequence mixer is: a causal map over tokens that carries its past in a state.

One class, one file, one line in the registry (:mod:`ovq.layers.registry`). The contract below is
held by one test suite that runs over every registry entry.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

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
    initial_beta: float
    ssmax_length: int | None
    initial_decay_rate: float
    num_first_tokens: int
    dictionary_distance: int
    max_rotary_position: int
    num_codes: int
    block_size: int
    straight_through: str
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

    @property
    def output_projection(self) -> nn.Linear:
        """The last map, to hidden states."""
        return self.get_submodule("o_proj")  # pyright: ignore[reportReturnType]

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
        """Bytes that the state of one row holds after ``num_tokens`` tokens: a figure, exact.

        Under autocast keys, values and convolution inputs are held as they are computed, so that
        a state has fewer.
        """


def check_hidden_states(hidden_states: Tensor, hidden_size: int) -> None:
    """Raise unless they are ``[B, T, hidden_size]``.

    Raises:
        ValueError: another shape.
    """
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != hidden_size:
        raise ValueError(
            f"hidden_states must be [B, T, {hidden_size}], got {tuple(hidden_states.shape)}"
        )


def check_state(state: MixerState, kind: type, hidden_states: Tensor) -> None:
    """Raise unless the state is of that class, one row a sequence, on the device of the tokens.

    Raises:
        ValueError: a state of another class, batch size or device.
    """
    if not isinstance(state, kind):
        raise ValueError(f"state must be of class {kind.__name__}, got {type(state).__name__}")
    if state.num_rows != len(hidden_states):
        raise ValueError(
            f"state must have one row a sequence, {len(hidden_states)} here, got {state.num_rows}"
        )
    if state.num_tokens.device != hidden_states.device:
        raise ValueError(
            f"state must be on {hidden_states.device} as hidden_states are, "
            f"got one on {state.num_tokens.device}"
        )


def check_sizes(**sizes: int) -> None:
    """Raise unless all sizes, by the names of their arguments, are at least 1.

    Raises:
        ValueError: a size below 1.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_above_zero(**numbers: Any) -> None:
    """Raise unless all, by the names of their arguments, are finite numbers above 0.

    Raises:
        ValueError: another number, or something that is none.
    """
    for name, number in numbers.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < math.inf:
            raise ValueError(f"{name} must be finite and above 0, got {number!r}")
