"""Full softmax attention, the baseline whose state grows with every token."""

from jaxtyping import Float
from torch import Tensor

from ovq.layers.base import MixerConfig
from ovq.layers.positions import token_positions
from ovq.layers.projected import ProjectedMixer
from ovq.layers.scalable_softmax import check_ssmax_length, scale_queries
from ovq.ops.attention import KVState, softmax_attention
from ovq.ops.rotary import rotate


class FullAttention(ProjectedMixer):
    """Causal softmax attention to all earlier tokens, with rotary positions or none.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``.
        head_dim: ``K = V``, even with rotary positions.
        rope_theta: base of the rotary frequencies; ``None`` for no positional encoding.
        ssmax_length: see :func:`~ovq.layers.scalable_softmax.scale_queries`.

    Raises:
        ValueError: sizes that do not fit one another, or an ``ssmax_length`` below 2.

    Example:
        >>> layer = FullAttention(16, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=10000.0)
        >>> output, state = layer(torch.randn(1, 5, 16))
        >>> tuple(output.shape), state.num_tokens.tolist()
        ((1, 5, 16), [5])
    """

    state_class = KVState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope_theta: float | None,
        ssmax_length: int | None = None,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        check_ssmax_length(ssmax_length)
        self.rope_theta = rope_theta
        self.ssmax_length = ssmax_length

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "FullAttention":
        """Full attention with rotary positions."""
        return cls._of(config, config.rope_theta)

    @classmethod
    def without_positions(cls, config: MixerConfig, layer_idx: int) -> "FullAttention":
        """Full attention with no positional encoding."""
        return cls._of(config, None)

    @classmethod
    def _of(cls, config: MixerConfig, rope_theta: float | None) -> "FullAttention":
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rope_theta=rope_theta,
            ssmax_length=config.ssmax_length,
        )

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: KVState | None = None
    ) -> tuple[Float[Tensor, "B T D"], KVState]:
        """Mix the tokens; keys are held as they are used, rotated."""
        q, k, v = (self.split_heads(x) for x in self.project(hidden_states, state))
        if self.rope_theta is not None:
            positions = token_positions(state, q.shape[1], q.device)[..., None]
            q, k = (rotate(x, positions, self.rope_theta) for x in (q, k))
        q = scale_queries(q, state, self.ssmax_length)
        o, state = softmax_attention(q, k, v, state)
        return self.merge_heads(o), state

    def init_state(self, batch_size: int) -> KVState:
        """The state before the first token, on the device and in the dtype of the parameters."""
        weight = self.k_proj.weight
        return KVState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: a key and a value per token and head, and the token count."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.k_proj.weight.element_size()
        return num_tokens * per_token + 8
