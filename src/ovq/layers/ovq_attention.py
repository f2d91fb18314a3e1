"""Online vector-quantized attention as a layer: projections, unit norms, a temperature per head."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig, check_above_zero
from ovq.layers.convolved import ConvolvedMixer, ConvolvedState
from ovq.layers.scalable_softmax import check_ssmax_length, scale_queries
from ovq.ops.ovq_attention import DictionaryConfig, OVQState, ovq_attention

INITIAL_BETA = 8.0


@dataclass(frozen=True, kw_only=True)
class OVQAttentionState(ConvolvedState):
    """What the layer remembers, an immutable value of constant size with one row a sequence.

    Attributes:
        memory: dictionaries, counts and the unfinished chunk.
        conv_inputs: ``[B, P, F]``, the last inputs of the short convolution; ``P = 0`` without one.
    """

    memory: OVQState


class OVQAttention(ConvolvedMixer):
    """Attention to the present chunk and to a dictionary learned in the forward pass.

    Queries and keys have unit norm, but for scalable softmax, no position is encoded, and the
    inverse temperature ``beta`` is learned for each head, as its logarithm.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``; each has a dictionary of its own.
        head_dim: ``K = V``.
        dictionary: how the dictionary is learned; :meth:`set_dictionary` changes it later.
        use_short_conv: whether a causal convolution of width 4 and SiLU follow the projections.
        initial_beta: of every head.
        ssmax_length: see :func:`~ovq.layers.scalable_softmax.scale_queries`.

    Raises:
        ValueError: sizes that do not fit one another, an ``initial_beta`` that is not above 0, or
            an ``ssmax_length`` below 2.

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
    memory_class = OVQState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dictionary: DictionaryConfig,
        use_short_conv: bool = False,
        initial_beta: float = INITIAL_BETA,
        ssmax_length: int | None = None,
    ):
        super().__init__(
            hidden_size, num_heads, num_kv_heads, head_dim, use_short_conv=use_short_conv
        )
        self.dictionary = dictionary
        check_above_zero(initial_beta=initial_beta)
        self.initial_beta = initial_beta
        check_ssmax_length(ssmax_length)
        self.ssmax_length = ssmax_length
        self.log_beta = nn.Parameter(torch.empty(num_heads))
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
            initial_beta=config.initial_beta,
            ssmax_length=config.ssmax_length,
        )

    def init_parameters(self) -> None:
        """``beta`` starts at ``initial_beta`` in every head."""
        nn.init.constant_(self.log_beta, math.log(self.initial_beta))

    @property
    def beta(self) -> Float[Tensor, " H"]:
        """Inverse temperature of each head, in float32 at least."""
        return self.log_beta.to(torch.promote_types(self.log_beta.dtype, torch.float32)).exp()

    def set_dictionary(self, dictionary: DictionaryConfig) -> None:
        """Run the same weights with another dictionary; states made before no longer fit."""
        self.dictionary = dictionary

    def queries_keys_values(
        self, hidden_states: Float[Tensor, "B T D"], state: OVQAttentionState | None = None
    ) -> tuple[
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T G K"],
        Float[Tensor, "B T G V"],
        Float[Tensor, "B P F"],
    ]:
        """As in the base class, queries and keys of unit norm, before queries are scaled."""
        q, k, v, past = super().queries_keys_values(hidden_states, state)
        memory = None if state is None else state.memory
        return scale_queries(unit_norm(q), memory, self.ssmax_length), unit_norm(k), v, past

    def mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        memory: OVQState | None,
    ) -> tuple[Float[Tensor, "B T H V"], OVQState]:
        """The operator with this layer's temperatures and dictionary."""
        return ovq_attention(q, k, v, self.beta, memory, dictionary=self.dictionary)

    def empty_memory(self, batch_size: int, device: torch.device) -> OVQState:
        """Dictionaries without slots."""
        return OVQState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            dictionary=self.dictionary, dtype=self.k_proj.weight.dtype, device=device,
        )  # fmt: skip


def unit_norm(x: Float[Tensor, "*shape K"]) -> Float[Tensor, "*shape K"]:
    """``x / |x|`` over the last axis, the norm taken in float32 at least; zeros stay zeros."""
    working = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(working), dim=-1).to(x.dtype)
