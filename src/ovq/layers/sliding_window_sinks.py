"""Softmax attention to a window of the latest tokens and to the first tokens of the sequence."""

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.layers.base import MixerConfig, check_sizes
from ovq.layers.projected import ProjectedMixer
from ovq.ops.sink_attention import SinkState, sink_attention


class SlidingWindowSinkAttention(ProjectedMixer):
    """Causal softmax attention with RoPE to the first ``S`` tokens and the latest ``W``.

    A window alone ruins a model trained with full attention, which rests on the first few tokens
    ("attention sinks"); with them it runs on in constant memory. While a sequence has no more than
    ``S + W`` tokens it is full attention.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``.
        head_dim: ``K = V``, even.
        window_size: ``W``, at least 1: a token sees itself and the ``W - 1`` before it.
        num_first_tokens: ``S``, at least 0.
        rope_theta: base of the rotary frequencies.
        max_position: the last position from which the first tokens are read.

    Raises:
        ValueError: sizes that do not fit one another.

    Example:
        >>> layer = SlidingWindowSinkAttention(
        ...     16, num_heads=2, num_kv_heads=1, head_dim=8, window_size=4, num_first_tokens=2,
        ...     rope_theta=10000.0, max_position=100,
        ... )
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(6)
        True

    Source: "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453).
    """

    state_class = SinkState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window_size: int,
        num_first_tokens: int,
        rope_theta: float,
        max_position: int,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        check_sizes(window_size=window_size)
        for name, number in (
            ("num_first_tokens", num_first_tokens), ("max_position", max_position),
        ):  # fmt: skip
            if number < 0:
                raise ValueError(f"{name} must be at least 0, got {number}")
        self.window_size = window_size
        self.num_first_tokens = num_first_tokens
        self.rope_theta = rope_theta
        self.max_position = max_position

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "SlidingWindowSinkAttention":
        """The layer of a model of this configuration."""
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            window_size=config.window_size,
            num_first_tokens=config.num_first_tokens,
            rope_theta=config.rope_theta,
            max_position=config.max_rotary_position,
        )

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: SinkState | None = None
    ) -> tuple[Float[Tensor, "B T D"], SinkState]:
        """Mix the tokens."""
        q, k, v = (self.split_heads(x) for x in self.project(hidden_states, state))
        # On the device of the tokens: that of offloaded weights is no place for it.
        state = self._empty(len(k), k.dtype, k.device) if state is None else state
        o, state = sink_attention(
            q, k, v, self.head_dim**-0.5, state,
            rope_theta=self.rope_theta, max_position=self.max_position,
        )  # fmt: skip
        return self.merge_heads(o), state

    def init_state(self, batch_size: int) -> SinkState:
        """The state before the first token, on the device and in the dtype of the parameters."""
        weight = self.k_proj.weight
        return self._empty(batch_size, weight.dtype, weight.device)

    def _empty(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> SinkState:
        return SinkState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            window_size=self.window_size, num_first_tokens=self.num_first_tokens,
            dtype=dtype, device=device,
        )  # fmt: skip

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: the first tokens, at most ``W - 1`` others, and two token counts."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.k_proj.weight.element_size()
        in_window = min(max(0, num_tokens - self.num_first_tokens), self.window_size - 1)
        return (self.num_first_tokens + in_window) * per_token + 16
