"""Attention to keys quantized by a codebook that training learns and a forward leaves alone."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig, check_above_zero
from ovq.layers.codebook import Codebook, CodebookHealth
from ovq.layers.convolved import ConvolvedMixer
from ovq.layers.ovq_attention import INITIAL_BETA, unit_norm
from ovq.layers.scalable_softmax import check_ssmax_length, scale_queries
from ovq.ops.quantization import quantized
from ovq.ops.vq_attention import check_straight_through, vq_attention
from ovq.ops.vq_state import VQState

COMMITMENT_WEIGHT = 1e-4


class VQAttention(ConvolvedMixer):
    """Softmax attention to quantized keys: OVQ attention with a static codebook in its place.

    Queries and keys have unit norm, but for scalable softmax, no position is encoded, and the
    inverse temperature ``beta`` is learned for each head, so that the layer differs from OVQ
    attention in its memory alone. Which half of that memory must be learned online? Two variants
    say:

    * ``quantize_values=False`` (``vq``), as in Transformer-VQ: the key codes are static, but each
      code's value is the running mean of the values that joined it in *this* sequence. Keys
      static, values online.
    * ``quantize_values=True`` (``vq_static_values``): values, too, are replaced by the nearest code
      of a codebook of theirs. All vectors are static; what is online is only how often each value
      code has gone with each key code.

    In training, a forward also records statistics of its keys (see
    :class:`~ovq.layers.codebook.Codebook`), and its commitment loss waits in
    :meth:`auxiliary_loss`: 1e-4 times the squared distance to the codes, summed over heads, at the
    squared norm ``K^(1/2)`` that keys have in Transformer-VQ. :class:`~ovq.models.OVQModel` calls
    :meth:`begin_training_forward` and :meth:`end_training_forward`, between which the codebook
    stands still; who trains the layer by itself calls them around each forward. In evaluation a
    forward changes and records nothing.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``; each has a codebook of its own.
        head_dim: ``K = V``.
        num_codes: ``S``.
        block_size: ``C``: a token sees the keys of its own block and the one before one by one.
        straight_through: which gradients pass the quantization of keys: ``"keys"``, as in
            Transformer-VQ, or ``"scores"``, with which queries and older keys learn more; see
            :func:`~ovq.ops.vq_attention.vq_attention`. In evaluation it makes no difference.
        quantize_values: whether values are quantized, too.
        use_short_conv: whether a causal convolution of width 4 and SiLU follow the projections.
        initial_beta: of every head.
        ssmax_length: see :func:`~ovq.layers.scalable_softmax.scale_queries`.

    Raises:
        ValueError: sizes that do not fit one another, an unknown ``straight_through``, an
            ``initial_beta`` that is not above 0, or an ``ssmax_length`` below 2.

    Example:
        >>> layer = VQAttention(16, num_heads=2, num_kv_heads=1, head_dim=8, num_codes=4,
        ...                     block_size=5)
        >>> layer.begin_training_forward()
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> layer.end_training_forward()
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True

    Source: "Transformer-VQ" (arXiv 2309.16354), without its gate, relative positions and shared
    heads.
    """

    memory_class = VQState
    gathers_statistics = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_codes: int,
        block_size: int,
        straight_through: str = "keys",
        quantize_values: bool = False,
        use_short_conv: bool = False,
        initial_beta: float = INITIAL_BETA,
        ssmax_length: int | None = None,
    ):
        super().__init__(
            hidden_size, num_heads, num_kv_heads, head_dim, use_short_conv=use_short_conv
        )
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        check_straight_through(straight_through)
        self.block_size = block_size
        check_above_zero(initial_beta=initial_beta)
        self.initial_beta = initial_beta
        check_ssmax_length(ssmax_length)
        self.ssmax_length = ssmax_length
        self.straight_through = straight_through
        self.log_beta = nn.Parameter(torch.empty(num_heads))
        self.key_codebook = Codebook(num_kv_heads, num_codes, head_dim)
        self.value_codebook = None
        if quantize_values:
            self.value_codebook = Codebook(num_kv_heads, num_codes, head_dim)
        self._auxiliary_loss: Tensor | None = None
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "VQAttention":
        """Static keys, online values."""
        return cls._of(config, False)

    @classmethod
    def with_static_values(cls, config: MixerConfig, layer_idx: int) -> "VQAttention":
        """Static keys, static values."""
        return cls._of(config, True)

    @classmethod
    def _of(cls, config: MixerConfig, quantize_values: bool) -> "VQAttention":
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            num_codes=config.num_codes,
            block_size=config.block_size,
            straight_through=config.straight_through,
            quantize_values=quantize_values,
            use_short_conv=config.use_short_conv,
            initial_beta=config.initial_beta,
            ssmax_length=config.ssmax_length,
        )

    @property
    def codebooks(self) -> dict[str, Codebook]:
        """The codebooks by what they quantize."""
        found = {"keys": self.key_codebook, "values": self.value_codebook}
        return {name: codebook for name, codebook in found.items() if codebook is not None}

    @property
    def beta(self) -> Float[Tensor, " H"]:
        """Inverse temperature of each head, in float32 at least."""
        return self.log_beta.to(torch.promote_types(self.log_beta.dtype, torch.float32)).exp()

    def init_parameters(self) -> None:
        """``beta`` starts at ``initial_beta`` in every head, the codebooks with nothing learned."""
        nn.init.constant_(self.log_beta, math.log(self.initial_beta))
        for codebook in self.codebooks.values():
            codebook.init_parameters()

    def begin_training_forward(self) -> None:
        """Set the codes to what has been learned."""
        for codebook in self.codebooks.values():
            codebook.begin_forward()

    def end_training_forward(self) -> None:
        """Learn from what the forward has recorded."""
        for codebook in self.codebooks.values():
            codebook.end_forward()

    def auxiliary_loss(self) -> Float[Tensor, ""] | None:
        """The commitment loss of the last forward, once; ``None`` outside training."""
        loss, self._auxiliary_loss = self._auxiliary_loss, None
        return loss

    def mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        memory: VQState | None,
    ) -> tuple[Float[Tensor, "B T H V"], VQState]:
        """The operator, on keys, and values where they are, quantized."""
        q, k = scale_queries(unit_norm(q), memory, self.ssmax_length), unit_norm(k)
        assigned = self.key_codebook.assign(k)
        seen = [(self.key_codebook, k, assigned)]
        if self.value_codebook is not None:
            seen.append((self.value_codebook, v, self.value_codebook.assign(v)))
            v = quantized(v, self.value_codebook.codes, seen[1][2])
        self._auxiliary_loss = self._learn(seen) if self.training else None
        return vq_attention(
            q, k, v, self.beta, self.key_codebook.codes, memory,
            block_size=self.block_size, straight_through=self.straight_through, assigned=assigned,
        )  # fmt: skip

    def empty_memory(self, batch_size: int, device: torch.device) -> VQState:
        """No token in any code, and an empty tail, in float32 at least."""
        return VQState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            num_codes=self.key_codebook.codes.shape[1], block_size=self.block_size,
            dtype=self.k_proj.weight.dtype, device=device,
        )  # fmt: skip

    def _learn(self, seen: list[tuple[Codebook, Tensor, Tensor]]) -> Float[Tensor, ""]:
        """Record what each codebook quantized; the commitment loss."""
        for codebook, x, assigned in seen:
            codebook.record(x, assigned)
        means = [codebook.commitment(x, assigned) for codebook, x, assigned in seen]
        weight = COMMITMENT_WEIGHT * self.num_kv_heads * math.sqrt(self.head_dim)
        return weight * torch.stack(means).sum()


def codebook_health(layer: VQAttention) -> dict[str, CodebookHealth]:
    """Whether the codes of a layer are used: live codes, perplexity, quantization error.

    Args:
        layer: trained or in training.

    Returns:
        One entry for ``"keys"``, and one for ``"values"`` if the layer quantizes them.

    Example:
        >>> layer = VQAttention(16, num_heads=2, num_kv_heads=1, head_dim=8, num_codes=4,
        ...                     block_size=5)
        >>> codebook_health(layer)["keys"].live_codes.tolist()  # nothing was trained
        [0]
    """
    return {name: codebook.health() for name, codebook in layer.codebooks.items()}
