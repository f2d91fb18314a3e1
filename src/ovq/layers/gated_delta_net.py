"""Gated DeltaNet: a decaying memory for each head, corrected by the error of its own recall."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import MixerConfig, check_above_zero, check_sizes
from ovq.layers.decay_parameters import (
    INITIAL_DECAY_RATE,
    start_rates,
    start_step_bias,
)
from ovq.layers.recurrent import RecurrentMixer, smooth_unit_norm
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.gated_delta_rule import gated_delta_rule

# Of the public implementations, whose checkpoints expect it.
NORM_EPS = 1e-5


class GatedDeltaNet(RecurrentMixer):
    """The gated delta rule between projections, with a short convolution and an output gate.

    A convolution of width 4 and SiLU follow the projections of queries, keys and values, which it
    always has; queries and keys have unit norm; no position is encoded. Each head has a memory
    ``[K, V]`` with log decay ``-exp(A_log) softplus(Wa x + dt_bias)`` and writing strength
    ``sigmoid(Wb x)``. Its output has unit mean square, times a weight and ``silu(Wg x)``.

    The projections have ``D H (2 K + 3 V + 2)`` parameters: ``5 D^2`` and a few if
    ``H K = H V = D``.

    Args:
        hidden_size: ``D``.
        num_heads: ``H``, of queries, keys and values alike.
        head_dim: ``K``.
        value_head_dim: ``V``; ``None`` for ``K``.
        initial_decay_rate: the largest that a head may start from.

    Raises:
        ValueError: a size below 1, or a rate that is not above 0.

    Example:
        >>> layer = GatedDeltaNet(16, num_heads=2, head_dim=8)
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True

    Source: "Gated Delta Networks" (arXiv 2412.06464), section 3.4; starting values and small
    constants as in flash-linear-attention.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        initial_decay_rate: float = INITIAL_DECAY_RATE,
    ):
        super().__init__(hidden_size)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        check_sizes(num_heads=num_heads, head_dim=head_dim, value_head_dim=value_head_dim)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.value_head_dim = value_head_dim
        check_above_zero(initial_decay_rate=initial_decay_rate)
        self.initial_decay_rate = initial_decay_rate
        key_size, value_size = num_heads * head_dim, num_heads * value_head_dim
        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.g_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.short_conv = ShortConvolution(2 * key_size + value_size)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.o_norm = nn.RMSNorm(value_head_dim, eps=NORM_EPS)
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "GatedDeltaNet":
        """The layer of a model of this configuration: ``H = num_attention_heads``, ``K = head_dim``
        and ``V = expand_v head_dim``; ``num_key_value_heads`` says nothing here.

        Raises:
            ValueError: ``V`` not a whole number.
        """
        value_head_dim = config.expand_v * config.head_dim
        if value_head_dim != int(value_head_dim):
            raise ValueError(
                f"expand_v must make a whole number of head_dim {config.head_dim}, "
                f"got {config.expand_v}"
            )
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            value_head_dim=int(value_head_dim),
            initial_decay_rate=config.initial_decay_rate,
        )

    def init_parameters(self) -> None:
        """Rates uniform up to ``initial_decay_rate``, steps log-uniform in 0.001 to 0.1, norm
        weights 1.
        """
        start_rates(self.A_log, lowest=0.0, highest=self.initial_decay_rate)
        start_step_bias(self.dt_bias)
        nn.init.ones_(self.o_norm.weight)

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """``H``, ``K`` and ``V``."""
        return self.num_heads, self.head_dim, self.value_head_dim

    def mix(
        self,
        hidden_states: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B H K V"],
        conv_inputs: Float[Tensor, "B P F"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H K V"], Float[Tensor, "B P F"]]:
        """The rule between projections."""
        q, k, v, conv_inputs = self._convolved(hidden_states, conv_inputs)
        g, beta = self._gates(hidden_states)
        o, memory = gated_delta_rule(q, k, v, g, beta, memory)
        return self._gated_output(o, hidden_states), memory, conv_inputs

    def _convolved(
        self, hidden_states: Float[Tensor, "B T D"], conv_inputs: Float[Tensor, "B P F"]
    ) -> tuple[
        Float[Tensor, "B T H K"], Float[Tensor, "B T H K"], Float[Tensor, "B T H V"],
        Float[Tensor, "B P F"],
    ]:  # fmt: skip
        """Queries, keys, values in float32 at least, and the convolution's last inputs."""
        projected = [proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        mixed, conv_inputs = self.short_conv(torch.cat(projected, dim=-1), conv_inputs)
        mixed = mixed.to(torch.promote_types(mixed.dtype, torch.float32))
        parts = mixed.split([x.shape[-1] for x in projected], dim=-1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in parts)
        return smooth_unit_norm(q), smooth_unit_norm(k), v, conv_inputs

    def _gates(
        self, hidden_states: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H"]]:
        """Log decay and writing strength, in float32 at least."""
        working = torch.promote_types(hidden_states.dtype, torch.float32)
        steps = F.softplus(self.a_proj(hidden_states).to(working) + self.dt_bias.to(working))
        beta = self.b_proj(hidden_states).to(working).sigmoid()
        return -self.A_log.to(working).exp() * steps, beta

    def _gated_output(
        self, o: Float[Tensor, "B T H V"], hidden_states: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).to(o.dtype)
        norm = self.o_norm  # in the wider dtype of the output
        normed = F.rms_norm(o, o.shape[-1:], norm.weight.to(o.dtype), norm.eps)
        gated = (normed * F.silu(gate)).flatten(2)
        return self.o_proj(gated.to(hidden_states.dtype))
