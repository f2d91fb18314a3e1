"""Every mixer by name. A new mixer is one file in this folder and one line here."""

from collections.abc import Callable

from ovq.layers.base import Mixer, MixerConfig
from ovq.layers.full_attention import FullAttention
from ovq.layers.gated_delta_net import GatedDeltaNet
from ovq.layers.linear_attention import LinearAttention
from ovq.layers.mamba2 import Mamba2
from ovq.layers.mesa_net import MesaNet
from ovq.layers.ovq_attention import OVQAttention
from ovq.layers.sliding_window import SlidingWindowAttention
from ovq.layers.vq_attention import VQAttention

MIXERS: dict[str, Callable[[MixerConfig, int], Mixer]] = {
    "full_attention": FullAttention.from_config,
    "full_attention_nope": FullAttention.without_positions,
    "sliding_window": SlidingWindowAttention.from_config,
    "ovq": OVQAttention.from_config,
    "vq": VQAttention.from_config,
    "vq_static_values": VQAttention.with_static_values,
    "linear_attention": LinearAttention.from_config,
    "linear_attention_normalized": LinearAttention.normalized,
    "gated_delta_net": GatedDeltaNet.from_config,
    "mamba2": Mamba2.from_config,
    "mesa_net": MesaNet.from_config,
}


def check_mixer_name(name: str, argument: str = "name") -> None:
    """Raise unless the registry has the mixer.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in MIXERS:
        raise ValueError(f"{argument} must be one of {sorted(MIXERS)}, got {name!r}")


def build_mixer(name: str, config: MixerConfig, layer_idx: int) -> Mixer:
    """The mixer of that name for a model of this configuration at layer ``layer_idx``.

    Raises:
        ValueError: an unknown name, or a configuration that the mixer cannot have.
    """
    check_mixer_name(name)
    return MIXERS[name](config, layer_idx)
