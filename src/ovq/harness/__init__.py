"""Scores of a saved model on lm-evaluation-harness's tasks, a thin call to that package.

``python -m ovq.harness`` is its own command line, with our models known to it.
"""

try:
    import lm_eval  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"ovq.harness needs {error.name or error}: pip install 'ovq[eval]'"
    ) from error

import ovq.models  # noqa: F401  # registers them with Auto*, which lm-eval loads by
from ovq.harness.items import TASKS_FOLDER, load_tasks
from ovq.harness.language_model import UntruncatedLM, load_model
from ovq.harness.measure import evaluate_tasks, measure_task
from ovq.harness.results import table

__all__ = [
    "TASKS_FOLDER",
    "UntruncatedLM",
    "evaluate_tasks",
    "load_model",
    "load_tasks",
    "measure_task",
    "table",
]
