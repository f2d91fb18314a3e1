"""Mamba-2: a selective state space with one decay a head, between one projection in and one out."""

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
from ovq.layers.recurrent import RecurrentMixer
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.ssd import ssd

# Of the public implementations, whose checkpoints expect it.
NORM_EPS = 1e-5


class Mamba2(RecurrentMixer):
    """State space duality between projections, with a short convolution and an output gate.

    One projection gives a gate ``z``, inputs ``x``, the maps ``B`` and ``C``, and step sizes. A
    convolution of width 4 with bias, and SiLU, follow on ``x``, ``B`` and ``C``. Each head has a
    state ``[K, V]`` with rate ``A = -exp(A_log)`` and step ``softplus(dt + dt_bias)``. The output,
    with ``D x`` added, times ``silu(z)``, has unit mean square over the heads of a group, times a
    weight. No position is encoded.

    The projections have ``D (3 H V + 2 G K + H)`` parameters: ``6 D^2`` and a few if ``H V = 2 D``.

    Args:
        hidden_size: ``D``.
        num_heads: ``H``.
        head_dim: ``V``, channels of one head.
        ssm_state_size: ``K``, numbers that one channel remembers.
        num_groups: ``G``, which divides ``H``; the heads of a group share ``B`` and ``C``.
        initial_decay_rate: the largest that a head may start from.

    Raises:
        ValueError: a size below 1, ``G`` not dividing ``H``, or a rate that is not above 0.

    Example:
        >>> layer = Mamba2(16, num_heads=4, head_dim=8, ssm_state_size=6)
        >>> output, state = layer(torch.randn(1, 50, 16))
        >>> state.num_bytes == layer.state_size(50) == layer.state_size(1)
        True

    Source: "Transformers are SSMs" (arXiv 2405.21060), section 7; starting values and small
    constants as in its public code.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        ssm_state_size: int,
        num_groups: int = 1,
        initial_decay_rate: float = INITIAL_DECAY_RATE,
    ):
        super().__init__(hidden_size)
        check_sizes(
            num_heads=num_heads,
            head_dim=head_dim,
            ssm_state_size=ssm_state_size,
            num_groups=num_groups,
        )
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads {num_heads}, got {num_groups}")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.ssm_state_size = ssm_state_size
        self.num_groups = num_groups
        check_above_zero(initial_decay_rate=initial_decay_rate)
        self.initial_decay_rate = initial_decay_rate
        inner_size, maps_size = num_heads * head_dim, num_groups * ssm_state_size
        conv_size = inner_size + 2 * maps_size
        self.in_proj = nn.Linear(hidden_size, inner_size + conv_size + num_heads, bias=False)
        self.short_conv = ShortConvolution(conv_size, bias=True)
        self.out_proj = nn.Linear(inner_size, hidden_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(inner_size, eps=NORM_EPS)
        self.init_parameters()

    @classmethod
    def from_config(cls, config: MixerConfig, layer_idx: int) -> "Mamba2":
        """The layer of a model of this configuration: ``V = head_dim``, ``K = ssm_state_size`` and
        ``H = ssm_expand hidden_size / head_dim``, whatever the number of attention heads.

        Raises:
            ValueError: ``H`` not a whole number.
        """
        num_heads = config.ssm_expand * config.hidden_size / config.head_dim
        if num_heads != int(num_heads):
            raise ValueError(
                f"ssm_expand must make of hidden_size {config.hidden_size} a multiple of head_dim "
                f"{config.head_dim}, got {config.ssm_expand}"
            )
        return cls(
            config.hidden_size,
            int(num_heads),
            config.head_dim,
            ssm_state_size=config.ssm_state_size,
            initial_decay_rate=config.initial_decay_rate,
        )

    @property
    def output_projection(self) -> nn.Linear:
        """Under the name it has in public checkpoints."""
        return self.out_proj

    def init_parameters(self) -> None:
        """Rates uniform from a sixteenth of ``initial_decay_rate`` up to it, steps log-uniform in
        0.001 to 0.1, ``D`` and norm weights 1.
        """
        highest = self.initial_decay_rate
        start_rates(self.A_log, lowest=highest / 16, highest=highest)
        start_step_bias(self.dt_bias)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm.weight)

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """``H``, ``K`` and ``V``."""
        return self.num_heads, self.ssm_state_size, self.head_dim

    def mix(
        self,
        hidden_states: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B H K V"],
        conv_inputs: Float[Tensor, "B P F"],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B H K V"], Float[Tensor, "B P F"]]:
        """The state space between projections."""
        sizes = [self.out_proj.in_features, conv_inputs.shape[-1], self.num_heads]
        z, x_B_C, dt = self.in_proj(hidden_states).split(sizes, dim=-1)
        x_B_C, conv_inputs = self.short_conv(x_B_C, conv_inputs)
        y, memory = self._scan(x_B_C, dt, memory)
        output = self.out_proj(self._gated_norm(y, z).to(hidden_states.dtype))
        return output, memory, conv_inputs

    def _scan(
        self,
        x_B_C: Float[Tensor, "B T F"],
        dt: Float[Tensor, "B T H"],
        memory: Float[Tensor, "B H K V"],
    ) -> tuple[Float[Tensor, "B T HV"], Float[Tensor, "B H K V"]]:
        """The state space and its skip ``D x``, in float32 at least."""
        working = torch.promote_types(x_B_C.dtype, torch.float32)
        maps_size = self.num_groups * self.ssm_state_size
        sizes = [self.num_heads * self.head_dim, maps_size, maps_size]
        x, B, C = x_B_C.to(working).split(sizes, dim=-1)
        x = x.unflatten(-1, (self.num_heads, -1))
        B, C = (maps.unflatten(-1, (self.num_groups, -1)) for maps in (B, C))
        dt = F.softplus(dt.to(working) + self.dt_bias.to(working))
        y, memory = ssd(x, dt, -self.A_log.to(working).exp(), B, C, memory)
        return (y + self.D.to(working)[:, None] * x).flatten(2), memory

    def _gated_norm(
        self, y: Float[Tensor, "B T HV"], z: Float[Tensor, "B T HV"]
    ) -> Float[Tensor, "B T HV"]:
        gated = (y * F.silu(z.to(y.dtype))).unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.norm.eps).flatten(2)
        return self.norm.weight.to(y.dtype) * normed
