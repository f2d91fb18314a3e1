"""Experiments: questions, the runs that answer them, and one command that runs what is missing."""

from ovq.experiments.plan import Entry, Experiment, Trial, total_minutes
from ovq.experiments.registry import ALL, EXPERIMENTS, make_experiments
from ovq.experiments.run import run_experiment

__all__ = [
    "ALL",
    "EXPERIMENTS",
    "Entry",
    "Experiment",
    "Trial",
    "make_experiments",
    "run_experiment",
    "total_minutes",
]
