"""Softmax attention to a window of the latest tokens: constant memory, no reach beyond it."""

from jaxtyping import Float
from torch import Tensor

from ovq.layers.base import MixerConfig
from ovq.layers.positions import token_positions
from ovq.layers.projected import ProjectedMixer
from ovq.ops.attention import KVState, softmax_attention
from ovq.ops.rotary import rotate


class SlidingWindowAttention(ProjectedMixer):
    """Causal softmax attention to the token itself and the ``W - 1`` before it, with RoPE.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``.
        head_dim: ``K = V``, even.
        window_size: ``W``, at least 1.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: sizes that do not fit one another.

    Example:
        >>> layer = SlidingWindowAttention(
        ...     16, num_heads=2, num_kv_heads=1, head_dim=8, window_size=4, rope_theta=10000.0
        ... )
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(4)
        True
    """

    state_class = KVState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window_size: int,
        rope_theta: float,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        if window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {window_size}")
        self.window_size = window_size
        self.rope_theta = rope_theta

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "SlidingWindowAttention":
        """The sliding-window layer of a model of this configuration."""
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            window_size=config.window_size,
            rope_theta=config.rope_theta,
        )

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: KVState | None = None
    ) -> tuple[Float[Tensor, "B T D"], KVState]:
        """Mix the tokens; the state holds the latest ``W - 1`` keys, rotated, and values."""
        q, k, v = (self.split_heads(x) for x in self.project(hidden_states, state))
        positions = token_positions(state, q.shape[1], q.device)[..., None]
        q, k = (rotate(x, positions, self.rope_theta) for x in (q, k))
        o, state = softmax_attention(q, k, v, state, window_size=self.window_size)
        return self.merge_heads(o), state

    def init_state(self, batch_size: int) -> KVState:
        """The state before the first token, on the device and in the dtype of the parameters."""
        weight = self.k_proj.weight
        return KVState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            window_size=self.window_size, dtype=weight.dtype, device=weight.device,
        )  # fmt: skip

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: keys and values of at most ``W - 1`` tokens, and the token count."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.k_proj.weight.element_size()
        return min(num_tokens, self.window_size - 1) * per_token + 8
