"""How large experiments are: on two cores in hours, in minutes, or as the paper's on GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCALES = ("demo", "paper")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What all suites of one scale share.

    Attributes:
        name: ``demo``, ``quick`` or ``paper``.
        learning_rates: to choose from.
        seeds: of weights and data.
        longest: context that is measured.
        num_answers: that each point measures about.
        core_only: whether a suite runs its most telling entries alone.
        model: fields of :class:`~ovq.models.OVQConfig` that suites start from.
        training: fields of :class:`~ovq.run_config.TrainingConfig`, likewise.
    """

    name: str
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    longest: int = 65_536
    num_answers: int = 1024
    core_only: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


# The model and the training that `make demo` has shown to learn recall, from a sharper start: beta
# is learned slowly, and what suffices among 128 tokens is too blunt among 65,536.
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "initializer_range": 0.1,
    "initial_beta": 32.0,
    "ssm_state_size": 64,
}
_LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "ssm_state_size": 128,
}

DEMO = Scale(
    name="demo",
    learning_rates=(3e-3, 1e-3),
    model=_SMALL,
    # Each of some thousand keys comes once in a few steps.
    training={"warmup_steps": 100, "curriculum": True, "adam_beta2": 0.999},
)
QUICK = Scale(
    name="quick",
    learning_rates=(3e-3,),
    seeds=(0,),
    longest=2048,
    num_answers=512,
    core_only=True,
    model=_SMALL,
    training=DEMO.training,
)
# Written for GPUs, through torchrun, and tested at toy sizes; its figures are not measured.
PAPER = Scale(
    name="paper",
    learning_rates=(1e-3, 3e-4),
    model=_LARGE,
    training={
        "warmup_steps": 1000,
        "weight_decay": 0.1,
        "curriculum": True,
        "bf16": True,
        "gradient_checkpointing": True,
        "save_every": 500,
    },
)


def make_scale(name: str, *, quick: bool = False) -> Scale:
    """The scale of that name.

    Raises:
        ValueError: an unknown name, or a quick one of another than ``demo``.
    """
    if name not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, got {name!r}")
    if quick and name != "demo":
        raise ValueError(f"--quick must go with --scale demo, got {name!r}")
    return PAPER if name == "paper" else QUICK if quick else DEMO
