"""The sections of the page, one question each. A new suite's is one file and one line here."""

from collections.abc import Callable

from ovq.report.records import Suite
from ovq.report.sections.ablations import ablations
from ovq.report.sections.base import Section
from ovq.report.sections.capacity import capacity
from ovq.report.sections.costs import costs
from ovq.report.sections.forgetting import forgetting
from ovq.report.sections.mqar import mqar, other
from ovq.report.sections.overview import goals, status
from ovq.report.sections.pairs import positional, recall
from ovq.report.sections.regression import regression
from ovq.report.sections.runs import runs

# By suite, in the order of the page; any other comes after these, as `other` shows it.
SECTIONS: dict[str, Callable[[Suite], Section]] = {
    "recall": recall,
    "positional": positional,
    "capacity": capacity,
    "regression": regression,
    "forgetting": forgetting,
    "ablations": ablations,
    "mqar": mqar,
}

__all__ = ["SECTIONS", "Section", "costs", "goals", "other", "runs", "status"]
