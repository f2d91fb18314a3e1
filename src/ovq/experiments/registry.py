"""All experiments by name. A new one is one file in ``suites/`` and one line here."""

from collections.abc import Callable

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale, make_scale
from ovq.experiments.suites.ablations import ablations
from ovq.experiments.suites.capacity import capacity
from ovq.experiments.suites.forgetting import forgetting
from ovq.experiments.suites.mqar import mqar
from ovq.experiments.suites.positional import positional
from ovq.experiments.suites.recall import recall
from ovq.experiments.suites.regression import regression

EXPERIMENTS: dict[str, Callable[[Scale], Experiment]] = {
    "recall": recall,
    "positional": positional,
    "regression": regression,
    "forgetting": forgetting,
    "mqar": mqar,
    "ablations": ablations,
    "capacity": capacity,
}
ALL = "all"


def make_experiments(name: str, scale: str = "demo", *, quick: bool = False) -> list[Experiment]:
    """The experiment of that name at a scale, or all of them, in order.

    Args:
        name: in ``EXPERIMENTS``, or ``all``.
        scale: ``demo`` or ``paper``.
        quick: a few minutes of each, to see that everything runs.

    Raises:
        ValueError: an unknown name or scale.

    >>> [entry.name for entry in make_experiments("recall", quick=True)[0].entries]
    ['full_attention_nope', 'ovq', 'gated_delta_net']
    """
    chosen = make_scale(scale, quick=quick)
    if name != ALL and name not in EXPERIMENTS:
        raise ValueError(f"SUITE must be one of {', '.join([*EXPERIMENTS, ALL])}, got {name!r}")
    return [make(chosen) for suite, make in EXPERIMENTS.items() if name in (suite, ALL)]
