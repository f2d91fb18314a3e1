"""Linear attention as a layer, without a normaliser or with the one of its first paper."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig
from ovq.layers.convolved import ConvolvedMixer
from ovq.ops.linear_attention import LinearAttentionState, linear_attention

NORM_EPS = 1e-5


class LinearAttention(ConvolvedMixer):
    """Linear attention between projections, with no position encoded and none forgotten.

    Without the normaliser the queries and keys are used as they are, and each head's output has
    unit mean square, times a weight: the sum grows with the number of tokens, and nothing else
    keeps it in range. It is the choice of RetNet and flash-linear-attention, trains more stably
    than dividing by ``z . q``, which may come near zero, and is what gated mixers build on. With
    the normaliser, ``elu + 1`` makes all weights positive, the output is a mean of values, and no
    norm follows.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``; each has a memory ``[K, V]``.
        head_dim: ``K = V``.
        normalize: whether ``elu + 1`` and the normaliser are applied, in place of the norm.
        use_short_conv: whether a causal convolution of width 4 and SiLU follow the projections.

    Raises:
        ValueError: sizes that do not fit one another.

    Example:
        >>> layer = LinearAttention(16, num_heads=2, num_kv_heads=1, head_dim=8)
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1) == 8 * 8 * 4 + 8
        True

    Source: "Transformers are RNNs" (arXiv 2006.16236); the norm of each head's output as in
    "Retentive Network" (arXiv 2307.08621), section 2.1, without its gate and decay.
    """

    memory_class = LinearAttentionState

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        normalize: bool = False,
        use_short_conv: bool = False,
    ):
        super().__init__(
            hidden_size, num_heads, num_kv_heads, head_dim, use_short_conv=use_short_conv
        )
        self.normalize = normalize
        self.norm_weight = None if normalize else nn.Parameter(torch.empty(head_dim))
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "LinearAttention":
        """Linear attention without the normaliser."""
        return cls._of(config, False)

    @classmethod
    def normalized(cls, config: MixerConfig, layer_idx: int) -> "LinearAttention":
        """Linear attention with ``elu + 1`` and the normaliser."""
        return cls._of(config, True)

    @classmethod
    def _of(cls, config: MixerConfig, normalize: bool) -> "LinearAttention":
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            normalize=normalize,
            use_short_conv=config.use_short_conv,
        )

    def init_parameters(self) -> None:
        """The norm's weights start at 1."""
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    def mix(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        memory: LinearAttentionState | None,
    ) -> tuple[Float[Tensor, "B T H V"], LinearAttentionState]:
        """The operator, and the norm of its output where there is one, in float32 at least."""
        working = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(working) for x in (q, k, v))
        o, memory = linear_attention(q, k, v, memory, normalize=self.normalize)
        if self.norm_weight is not None:
            o = F.rms_norm(o, (self.head_dim,), self.norm_weight.to(working), NORM_EPS)
        return o, memory

    def empty_memory(self, batch_size: int, device: torch.device) -> LinearAttentionState:
        """Zeros, in float32 at least."""
        return LinearAttentionState.empty(
            batch_size, self.num_kv_heads, self.head_dim, self.head_dim,
            normalize=self.normalize, dtype=self.k_proj.weight.dtype, device=device,
        )  # fmt: skip
