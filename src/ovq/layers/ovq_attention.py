"""Online vector-quantized attention as a layer: projections, unit norms, a temperature per head."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ovq.layers.base import MixerConfig
from ovq.layers.projected import ProjectedMixer
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.ovq_attention import DictionaryConfig, OVQState, ovq_attention

INITIAL_BETA = 8.0


@dataclass(frozen=True, kw_only=True)
class OVQAttentionState:
    """What the layer remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        memory: dictionaries, counts and the unfinished chunk.
        conv_inputs: ``[B, P, F]``, the last inputs of the short convolution; ``P = 0`` without one.
    """

    memory: OVQState
    conv_inputs: Float[Tensor, "B P F"]

    @classmethod
    def concat(cls, states: Sequence["OVQAttentionState"]) -> "OVQAttentionState":
        """One state with the rows of several, in order."""
        return cls(
            memory=OVQState.concat([state.memory for state in states]),
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

    def select_rows(self, rows: Int[Tensor, " R"]) -> "OVQAttentionState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        inputs = self.conv_inputs.index_select(0, rows.to(self.conv_inputs.device))
        return type(self)(memory=self.memory.select_rows(rows), conv_inputs=inputs)

    def detach(self) -> "OVQAttentionState":
        """The same numbers, cut from the autograd graph."""
        return type(self)(memory=self.memory.detach(), conv_inputs=self.conv_inputs.detach())

    def to(self, device: torch.device | str) -> "OVQAttentionState":
        """The same state on another device."""
        return type(self)(memory=self.memory.to(device), conv_inputs=self.conv_inputs.to(device))


class OVQAttention(ProjectedMixer):
    """Attention to the present chunk and to a dictionary learned in the forward pass.

    Queries and keys have unit norm, no position is encoded, and the inverse temperature ``beta`` is
    learned for each head, as its logarithm.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``; each has a dictionary of its own.
        head_dim: ``K = V``.
        dictionary: how the dictionary is learned; :meth:`set_dictionary` changes it later.
        use_short_conv: whether a causal convolution of width 4 and SiLU follow the projections.

    Raises:
        ValueError: sizes that do not fit one another.

    Example:
        >>> dictionary = DictionaryConfig(num_centroids=8, chunk_size=4)
        >>> layer = OVQAttention(16, num_heads=2, num_kv_heads=1, head_dim=8, dictionary=dictionary)
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922); the layer around the operator is
    this project's reconstruction.
    """

    state_class = OVQAttentionState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dictionary: DictionaryConfig,
        use_short_conv: bool = False,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        self.dictionary = dictionary
        self.log_beta = nn.Parameter(torch.empty(num_heads))
        channels = (num_heads + 2 * num_kv_heads) * head_dim
        self.short_conv = ShortConvolution(channels) if use_short_conv else None
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "OVQAttention":
        """The OVQ layer of a model of this configuration."""
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dictionary=DictionaryConfig(**config.dictionary),
            use_short_conv=config.use_short_conv,
        )

    def init_parameters(self) -> None:
        """``beta`` starts at 8 in every head."""
        nn.init.constant_(self.log_beta, math.log(INITIAL_BETA))

    @property
    def beta(self) -> Float[Tensor, " H"]:
        """Inverse temperature of each head, in float32 at least."""
        return self.log_beta.to(torch.promote_types(self.log_beta.dtype, torch.float32)).exp()

    def set_dictionary(self, dictionary: DictionaryConfig) -> None:
        """Run the same weights with another dictionary; states made before no longer fit."""
        self.dictionary = dictionary

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: OVQAttentionState | None = None
    ) -> tuple[Float[Tensor, "B T D"], OVQAttentionState]:
        """Mix the tokens.

        Raises:
            ValueError: hidden states that do not fit, or a state of another batch size or
                dictionary.
        """
        q, k, v, past = self.queries_keys_values(hidden_states, state)
        memory = None if state is None else state.memory
        o, memory = ovq_attention(q, k, v, self.beta, memory, dictionary=self.dictionary)
        return self.merge_heads(o), OVQAttentionState(memory=memory, conv_inputs=past)

    def queries_keys_values(
        self, hidden_states: Float[Tensor, "B T D"], state: OVQAttentionState | None = None
    ) -> tuple[
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T G K"],
        Float[Tensor, "B T G V"],
        Float[Tensor, "B P F"],
    ]:
        """What the operator is called with, queries and keys of unit norm.

        Returns:
            Queries, keys, values, and the last inputs of the short convolution after these tokens.

        Raises:
            ValueError: as :meth:`forward`.
        """
        projected = self.project(hidden_states, state)
        if state is None:
            past = self._initial_conv_inputs(len(hidden_states))
        else:
            past = state.conv_inputs
            self._check_conv_inputs(past, len(hidden_states))
        if self.short_conv is not None:
            mixed, past = self.short_conv(torch.cat(projected, dim=-1), past)
            projected = mixed.split([x.shape[-1] for x in projected], dim=-1)
        q, k, v = (self.split_heads(x) for x in projected)
        return unit_norm(q), unit_norm(k), v, past

    def init_state(self, batch_size: int) -> OVQAttentionState:
        """The state before the first token, on the device of the parameters.

        The memory is in float32, in float64 with float64 parameters.
        """
        weight = self.k_proj.weight
        memory = self._empty_memory(batch_size, weight.device)
        return OVQAttentionState(memory=memory, conv_inputs=self._initial_conv_inputs(batch_size))

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: the same number after any number of tokens."""
        conv_inputs = self._initial_conv_inputs(1)
        conv_bytes = conv_inputs.numel() * conv_inputs.element_size()
        return self._empty_memory(1, torch.device("meta")).num_bytes + conv_bytes

    def _empty_memory(self, batch_size: int, device: torch.device) -> OVQState:
        return OVQState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            dictionary=self.dictionary, dtype=self.k_proj.weight.dtype, device=device,
        )  # fmt: skip

    def _initial_conv_inputs(self, batch_size: int) -> Float[Tensor, "B P F"]:
        if self.short_conv is None:
            return self.log_beta.new_zeros(batch_size, 0, 0)
        return self.short_conv.init_state(batch_size)

    def _check_conv_inputs(self, past: Tensor, batch_size: int) -> None:
        wanted = self._initial_conv_inputs(batch_size).shape
        if past.shape != wanted:
            raise ValueError(
                f"state must hold convolution inputs {tuple(wanted)} for this batch and layer, "
                f"got {tuple(past.shape)}"
            )


def unit_norm(x: Float[Tensor, "*shape K"]) -> Float[Tensor, "*shape K"]:
    """``x / |x|`` over the last axis, the norm taken in float32 at least; zeros stay zeros."""
    working = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(working), dim=-1).to(x.dtype)
