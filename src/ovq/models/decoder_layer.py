"""One layer of the model: a sequence mixer and a feed-forward block, behind norms."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ovq.layers import MixerState, build_mixer
from ovq.models.configuration_ovq import OVQConfig

STARTS_AT_ZERO = "starts_at_zero"  # an attribute of modules whose weights do


class OVQRMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32 at least.

    Source: "Root Mean Square Layer Normalization" (arXiv 1910.07467), equation 4.
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Normalise, keeping shape and dtype."""
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(hidden_states.dtype)


class OVQSwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the feed-forward block.

    Source: "GLU Variants Improve Transformer" (arXiv 2002.05202), equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Apply to each token by itself."""
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class OVQDecoderLayer(GradientCheckpointingLayer):
    """A mixer and a feed-forward block, each behind a norm and beside a residual path."""

    def __init__(self, config: OVQConfig, layer_idx: int):
        super().__init__()
        name = config.mixer_names[layer_idx]
        self.mixer = build_mixer(name, config.for_layer(layer_idx), layer_idx)
        self.mlp = OVQSwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = OVQRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OVQRMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer_idx < config.num_identity_layers:
            # transformers initialises modules with parameters of their own alone: not this one.
            for projection in (self.mixer.output_projection, self.mlp.down_proj):
                setattr(projection, STARTS_AT_ZERO, True)

    def forward(
        self, hidden_states: Float[Tensor, "B T D"], state: MixerState | None = None
    ) -> tuple[Float[Tensor, "B T D"], MixerState, Float[Tensor, ""] | None]:
        """The layer's hidden states ``[B, T, D]``, its mixer's state after them, and its loss.

        The mixer's auxiliary loss is an output, so that its gradient flows whatever gradient
        checkpointing repeats.
        """
        mixed, after = self.mixer(self.input_layernorm(hidden_states), state)
        auxiliary_loss = self.mixer.auxiliary_loss()
        hidden_states = hidden_states + mixed
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, after, auxiliary_loss
