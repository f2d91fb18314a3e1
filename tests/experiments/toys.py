"""Experiments small enough to run in a second."""

from dataclasses import replace

from ovq.experiments import Entry, Experiment
from ovq.points import Point

from ..tiny import tiny_run

POINTS = (
    Point(length=32, setting="T/4", num_sequences=2),
    Point(length=64, setting="T/4", num_sequences=2, changes={"tokens_per_pair": 16}),
)


def toy_entry(name: str, mixer: str, **training) -> Entry:
    """A model of the tiny recall run."""
    config = tiny_run(**({"num_steps": 4, "save_every": 2} | training))
    model = config.model | {"layer_pattern": ["sliding_window", mixer]}
    config = replace(config, name=f"toy-{name}", model=model)
    points = POINTS if mixer == "ovq" else tuple(replace(p, setting=None) for p in POINTS)
    return Entry(suite="toy", name=name, config=config, points=points)


def toy_experiment(**changes) -> Experiment:
    """Two mixers, two learning rates, two seeds."""
    fields = {
        "name": "toy",
        "scale": "demo",
        "question": "Does it run?",
        "entries": (toy_entry("ovq", "ovq"), toy_entry("full", "full_attention_nope")),
        "learning_rates": (1e-2, 1e-4),
        "seeds": (0, 1),
    }
    return Experiment(**(fields | changes))
