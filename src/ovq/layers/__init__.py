"""Sequence mixers as layers with a carried state; they need torch and jaxtyping alone."""

from ovq.layers.base import Mixer, MixerConfig, MixerState
from ovq.layers.full_attention import FullAttention
from ovq.layers.ovq_attention import OVQAttention
from ovq.layers.padding import without_padding
from ovq.layers.registry import MIXERS, build_mixer
from ovq.layers.sliding_window import SlidingWindowAttention

__all__ = [
    "MIXERS",
    "FullAttention",
    "Mixer",
    "MixerConfig",
    "MixerState",
    "OVQAttention",
    "SlidingWindowAttention",
    "build_mixer",
    "without_padding",
]
