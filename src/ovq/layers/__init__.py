"""Sequence mixers as layers with a carried state; they need torch and jaxtyping alone."""

from ovq.layers.base import Mixer, MixerConfig, MixerState
from ovq.layers.full_attention import FullAttention
from ovq.layers.gated_delta_net import GatedDeltaNet
from ovq.layers.linear_attention import LinearAttention
from ovq.layers.mamba2 import Mamba2
from ovq.layers.mesa_net import MesaNet
from ovq.layers.ovq_attention import OVQAttention
from ovq.layers.padding import without_padding
from ovq.layers.registry import MIXERS, build_mixer
from ovq.layers.sliding_window import SlidingWindowAttention
from ovq.layers.sliding_window_sinks import SlidingWindowSinkAttention
from ovq.layers.vq_attention import VQAttention, codebook_health
from ovq.layers.windowed_ovq import WindowedOVQAttention

__all__ = [
    "MIXERS",
    "FullAttention",
    "GatedDeltaNet",
    "LinearAttention",
    "Mamba2",
    "MesaNet",
    "Mixer",
    "MixerConfig",
    "MixerState",
    "OVQAttention",
    "SlidingWindowAttention",
    "SlidingWindowSinkAttention",
    "VQAttention",
    "WindowedOVQAttention",
    "build_mixer",
    "codebook_health",
    "without_padding",
]
