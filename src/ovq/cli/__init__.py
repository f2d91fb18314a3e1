"""The command line: ``ovq train``, ``evaluate``, ``generate``, ``report`` and the rest."""

from ovq.cli.shared import app, run

from ovq.cli import training, evaluating, reading, converting, measuring, experimenting  # isort: skip
from ovq.cli import reporting  # isort: skip

# Each module adds its commands to the application, in the order in which the help lists them.
__all__ = [
    "app",
    "converting",
    "evaluating",
    "experimenting",
    "measuring",
    "reading",
    "reporting",
    "run",
    "training",
]
