"""Models of equal numbers of parameters, one a mixer, and what each holds and computes."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ovq.comparison.flops import training_flops
from ovq.layers.registry import check_mixer_name, options_of
from ovq.models import OVQConfig, OVQForCausalLM

TOLERANCE = 0.02  # of the number of parameters


def reference(mixers: Sequence[str]) -> str:
    """Full attention if it is among the mixers, else the first.

    Example:
        >>> reference(["ovq", "full_attention"])
        'full_attention'
    """
    return "full_attention" if "full_attention" in mixers else mixers[0]


def check_mixers(mixers: Sequence[str]) -> None:
    """Raise unless the registry has the mixers, each of them given once.

    Raises:
        ValueError: none, one twice, or an unknown name.
    """
    if not mixers or len(set(mixers)) != len(mixers):
        raise ValueError(f"mixers must be at least one, each once, got {list(mixers)}")
    for name in mixers:
        check_mixer_name(name, "mixers")


def equal_models(
    mixers: Sequence[str], base: OVQConfig | dict[str, Any], *, pure: bool = False
) -> dict[str, OVQConfig]:
    """Configurations of equal numbers of parameters, one a mixer.

    Nothing but ``layer_pattern`` and ``intermediate_size`` differs from ``base``, except that
    ``use_short_conv`` and ``ssmax_length`` have their defaults where the mixer has no such option.
    The reference, full attention if it is among the mixers and else the first, keeps its
    ``intermediate_size``. Codebooks, which are no parameters, are not counted.

    Args:
        mixers: names in the registry, each once.
        base: a configuration or its fields; its ``layer_pattern`` is not used.
        pure: whether every layer has the mixer; the pattern is ``["sliding_window", mixer]`` if
            not.

    Returns:
        By name, within 2 % of the reference's number of parameters.

    Raises:
        ValueError: unknown mixers, or one that no ``intermediate_size`` makes equal.

    Example:
        >>> models = equal_models(["full_attention", "mamba2"], OVQConfig(), pure=True)
        >>> [models[name].intermediate_size for name in models]
        [1408, 971]
    """
    check_mixers(mixers)
    if not isinstance(base, OVQConfig):
        base = OVQConfig(**{name: base[name] for name in base if name != "layer_pattern"})
    of_reference = _with(base, reference(mixers), base.intermediate_size, pure)
    target = num_parameters(of_reference)
    return {name: _equal_model(name, base, target, pure) for name in mixers}


def _equal_model(name: str, base: OVQConfig, target: int, pure: bool) -> OVQConfig:
    smallest, next_one = (num_parameters(_with(base, name, size, pure)) for size in (1, 2))
    size = 1 + round((target - smallest) / (next_one - smallest))
    if size < 1:
        raise ValueError(
            f"mixers must have models of {target:,} parameters, got {name!r} with {smallest:,} "
            "at intermediate_size 1"
        )
    config = _with(base, name, size, pure)
    found = num_parameters(config)
    if abs(found / target - 1) > TOLERANCE:
        raise ValueError(
            f"mixers must have models within {TOLERANCE:.0%} of {target:,} parameters, got "
            f"{name!r} with {found:,} at intermediate_size {size}"
        )
    return config


def _with(base: OVQConfig, name: str, intermediate_size: int, pure: bool) -> OVQConfig:
    pattern = [name] if pure else ["sliding_window", name]
    changes = {"layer_pattern": pattern, "intermediate_size": intermediate_size}
    return OVQConfig.from_dict(options_of(name, base.to_dict()) | changes)


def _on_meta(config: OVQConfig) -> OVQForCausalLM:
    with torch.device("meta"):  # shapes without memory
        return OVQForCausalLM(config)


def num_parameters(config: OVQConfig) -> int:
    """Numbers that gradients train."""
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


def sizes(config: OVQConfig, lengths: Iterable[int]) -> dict[str, Any]:
    """What needs no clock: sizes of a model, and what it holds and computes at each length.

    Returns:
        ``layer_pattern``, ``intermediate_size``, ``parameters``, ``codebooks`` (numbers that
        training sets by other means than gradients), and by length, as text, ``state_bytes`` of one
        sequence and ``training_flops`` of one forward and backward over it.
    """
    model, lengths = _on_meta(config), list(lengths)
    return {
        "layer_pattern": config.layer_pattern,
        "intermediate_size": config.intermediate_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "codebooks": sum(buffer.numel() for buffer in model.buffers()),
        "state_bytes": {str(length): model.state_size(length) for length in lengths},
        "training_flops": {str(t): f for t, f in training_flops(config, lengths).items()},
    }


def make_model(config: OVQConfig, seed: int) -> OVQForCausalLM:
    """The model with random weights, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OVQForCausalLM(config)


def token_ids(config: OVQConfig, num_tokens: int, seed: int) -> Int[Tensor, "1 T"]:
    """One sequence of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (1, num_tokens), generator=generator)
