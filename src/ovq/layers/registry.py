"""Every mixer by name. A new mixer is one file in this folder and one line here."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ovq.layers.base import Mixer, MixerConfig
from ovq.layers.full_attention import FullAttention
from ovq.layers.gated_delta_net import GatedDeltaNet
from ovq.layers.linear_attention import LinearAttention
from ovq.layers.mamba2 import Mamba2
from ovq.layers.mesa_net import MesaNet
from ovq.layers.ovq_attention import OVQAttention
from ovq.layers.scalable_softmax import check_ssmax_length
from ovq.layers.sliding_window import SlidingWindowAttention
from ovq.layers.sliding_window_sinks import SlidingWindowSinkAttention
from ovq.layers.vq_attention import VQAttention
from ovq.layers.windowed_ovq import WindowedOVQAttention

MIXERS: dict[str, Callable[[MixerConfig, int], Mixer]] = {
    "full_attention": FullAttention.from_config,
    "full_attention_nope": FullAttention.without_positions,
    "sliding_window": SlidingWindowAttention.from_config,
    "sliding_window_sinks": SlidingWindowSinkAttention.from_config,
    "ovq": OVQAttention.from_config,
    "windowed_ovq": WindowedOVQAttention.from_config,
    "vq": VQAttention.from_config,
    "vq_static_values": VQAttention.with_static_values,
    "linear_attention": LinearAttention.from_config,
    "linear_attention_normalized": LinearAttention.normalized,
    "gated_delta_net": GatedDeltaNet.from_config,
    "mamba2": Mamba2.from_config,
    "mesa_net": MesaNet.from_config,
}

# They have a short convolution, always or with the configuration's `use_short_conv`.
WITH_SHORT_CONV = frozenset(
    {
        "ovq", "vq", "vq_static_values", "linear_attention", "linear_attention_normalized",
        "gated_delta_net", "mamba2", "mesa_net",
    }
)  # fmt: skip

# They attend to all that came before, and have scalable softmax with `ssmax_length`.
WITH_SSMAX = frozenset({"full_attention", "full_attention_nope", "ovq", "vq", "vq_static_values"})

# Their dictionaries take another number of slots after training, too.
WITH_DICTIONARY = frozenset({"ovq", "windowed_ovq"})


def check_mixer_name(name: str, argument: str = "name") -> None:
    """Raise unless the registry has the mixer.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in MIXERS:
        raise ValueError(f"{argument} must be one of {sorted(MIXERS)}, got {name!r}")


def options_of(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a model without the options that layers of a mixer do not have.

    Args:
        name: of the mixer.
        fields: of any model.

    Example:
        >>> options_of("full_attention", {"hidden_size": 64, "use_short_conv": True})
        {'hidden_size': 64}
    """
    able = {"use_short_conv": WITH_SHORT_CONV, "ssmax_length": WITH_SSMAX}
    return {field: fields[field] for field in fields if name in able.get(field, MIXERS)}


def check_short_conv(use_short_conv: bool, names: Iterable[str]) -> None:
    """Raise if short convolutions are asked for and none of the mixers may have one.

    Raises:
        ValueError: they are; the message lists the mixers that may.
    """
    if use_short_conv:
        _check_some(WITH_SHORT_CONV, names, "use_short_conv must be false")


def check_ssmax(ssmax_length: int | None, names: Iterable[str]) -> None:
    """Raise if scalable softmax is asked for and none of the mixers may have it.

    Raises:
        ValueError: it is, with the mixers that may; or a length below 2.
    """
    check_ssmax_length(ssmax_length)
    if ssmax_length is not None:
        _check_some(WITH_SSMAX, names, "ssmax_length must be none")


def _check_some(able: frozenset[str], names: Iterable[str], rule: str) -> None:
    if not able.intersection(names):
        raise ValueError(
            f"{rule} unless one of the mixers {sorted(able)} is in layer_pattern, got {list(names)}"
        )


def build_mixer(name: str, config: MixerConfig, layer_idx: int) -> Mixer:
    """The mixer of that name for a model of this configuration at layer ``layer_idx``.

    Raises:
        ValueError: an unknown name, or a configuration that the mixer cannot have.
    """
    check_mixer_name(name)
    return MIXERS[name](config, layer_idx)
