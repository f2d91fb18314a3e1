"""MesaNet: each head answers with the best linear map from the keys so far to their values."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig, check_sizes
from ovq.layers.recurrent import RecurrentMixer, smooth_unit_norm
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.mesa import mesa

# Of the public implementation.
NORM_EPS = 1e-5
LOWEST_REGULARIZATION = 0.25


class MesaNet(RecurrentMixer):
    """The mesa recurrence between projections, its systems solved exactly.

    A convolution of width 4 and SiLU follow the projections of queries and keys, which have unit
    norm; no position is encoded. Decay and weight of each token are ``sigmoid(Wa x + a)`` and
    ``sigmoid(Wb x + b)``; the regularisation of each key dimension is learned, above 0.25. The
    output of a head has unit mean square, times a weight.

    The projections have ``D H (4 K + 2) + 2 H`` parameters: ``4 D^2`` and a few if ``H K = D``.

    Args:
        hidden_size: ``D``.
        num_heads: ``H``, of queries, keys and values alike.
        head_dim: ``K = V``.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> layer = MesaNet(16, num_heads=2, head_dim=8)
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True

    Source: "MesaNet" (arXiv 2506.05233), section 3; choices and starting values as in
    flash-linear-attention.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__(hidden_size)
        check_sizes(num_heads=num_heads, head_dim=head_dim)
        self.num_heads = num_heads
        self.head_dim = head_dim
        inner_size = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads)
        self.b_proj = nn.Linear(hidden_size, num_heads)
        self.o_proj = nn.Linear(inner_size, hidden_size, bias=False)
        self.short_conv = ShortConvolution(2 * inner_size)
        self.lambda_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.o_norm = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "MesaNet":
        """The layer of a model of this configuration: ``H = num_attention_heads``,
        ``K = V = head_dim``; ``num_key_value_heads`` says nothing here.
        """
        return cls(config.hidden_size, config.num_attention_heads, config.head_dim)

    def init_parameters(self) -> None:
        """The regularisation starts at 1, norm weights at 1."""
        nn.init.constant_(self.lambda_bias, math.log(math.expm1(1 - LOWEST_REGULARIZATION)))
        nn.init.ones_(self.o_norm.weight)

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """``H``, ``K`` and ``K + V``: the sums of two recurrences, side by side."""
        return self.num_heads, self.head_dim, 2 * self.head_dim

    def mix(
        self,
        hidden_states: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B H K V"],
        conv_inputs: Float[Tensor, "B P F"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H K V"], Float[Tensor, "B P F"]]:
        """The recurrence between projections."""
        working = torch.promote_types(hidden_states.dtype, torch.float32)
        projected = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states)], dim=-1)
        mixed, conv_inputs = self.short_conv(projected, conv_inputs)
        parts = (*mixed.chunk(2, dim=-1), self.v_proj(hidden_states))
        q, k, v = (x.to(working).unflatten(-1, (self.num_heads, -1)) for x in parts)
        g = F.logsigmoid(self.a_proj(hidden_states).to(working))
        beta = self.b_proj(hidden_states).to(working).sigmoid()
        lamb = F.softplus(self.lambda_bias.to(working)) + LOWEST_REGULARIZATION
        q, k = smooth_unit_norm(q), smooth_unit_norm(k)
        o, memory = mesa(q, k, v, g, beta, lamb, memory)
        normed = F.rms_norm(o, o.shape[-1:], self.o_norm.weight.to(o.dtype), self.o_norm.eps)
        output = self.o_proj(normed.flatten(2).to(hidden_states.dtype))
        return output, memory, conv_inputs
