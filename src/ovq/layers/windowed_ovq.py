"""Rotary sliding-window attention with an OVQ dictionary of what has left the window."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig
from ovq.layers.projected import ProjectedMixer
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.ops.windowed_ovq import Positions, WindowedOVQState, windowed_ovq_attention


class WindowedOVQAttention(ProjectedMixer):
    """Softmax attention with RoPE to a window and the first tokens, and to a dictionary beyond.

    Its projections are those of full attention with RoPE, and while a sequence fits the window it
    is that attention: so it can take the place of a trained one and run in constant memory.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``; each has a dictionary of its own.
        head_dim: ``K = V``, even.
        dictionary: how the dictionary is learned; its ``window_size`` is the window.
        num_first_tokens: tokens that stay exact for good.
        positions: where the dictionary and the first tokens are read.

    Raises:
        ValueError: sizes that do not fit one another.

    Example:
        >>> layer = WindowedOVQAttention(
        ...     16, num_heads=2, num_kv_heads=1, head_dim=8, num_first_tokens=2,
        ...     dictionary=DictionaryConfig(num_centroids=8, chunk_size=4, window_size=8),
        ...     positions=Positions(rope_theta=10000.0, distance=20, max_position=100),
        ... )
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True
    """

    state_class = WindowedOVQState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dictionary: DictionaryConfig,
        num_first_tokens: int,
        positions: Positions,
    ):
        super().__init__(hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        self.dictionary = dictionary
        self.num_first_tokens = num_first_tokens
        self.positions = positions
        self.dictionary_bias = nn.Parameter(torch.empty(num_heads))
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "WindowedOVQAttention":
        """The layer of a model of this configuration."""
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dictionary=DictionaryConfig(**config.dictionary),
            num_first_tokens=config.num_first_tokens,
            positions=Positions(
                rope_theta=config.rope_theta,
                distance=config.dictionary_distance,
                max_position=config.max_rotary_position,
            ),
        )

    def init_parameters(self) -> None:
        """The dictionary starts without a bias."""
        nn.init.zeros_(self.dictionary_bias)

    def set_dictionary(self, dictionary: DictionaryConfig) -> None:
        """Run the same weights with another dictionary; states made before no longer fit."""
        self.dictionary = dictionary

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: WindowedOVQState | None = None
    ) -> tuple[Float[Tensor, "B T D"], WindowedOVQState]:
        """Mix the tokens.

        Raises:
            ValueError: hidden states that do not fit, or a state of another batch size or mixer.
        """
        q, k, v = (self.split_heads(x) for x in self.project(hidden_states, state))
        o, state = windowed_ovq_attention(
            q, k, v, self.head_dim**-0.5, self.dictionary_bias, state,
            dictionary=self.dictionary, num_first_tokens=self.num_first_tokens,
            positions=self.positions,
        )  # fmt: skip
        return self.merge_heads(o), state

    def init_state(self, batch_size: int) -> WindowedOVQState:
        """The state before the first token, on the device of the parameters."""
        return self._empty(batch_size, self.k_proj.weight.device)

    def state_size(self, num_tokens: int) -> int:
        """Bytes of one row: the same number after any number of tokens."""
        return self._empty(1, torch.device("meta")).num_bytes

    def _empty(self, batch_size: int, device: torch.device) -> WindowedOVQState:
        return WindowedOVQState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            dictionary=self.dictionary, num_first_tokens=self.num_first_tokens,
            dtype=self.k_proj.weight.dtype, device=device,
        )  # fmt: skip
