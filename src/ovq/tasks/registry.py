"""All tasks by name, and their form in run files."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ovq.tasks.base import Task
from ovq.tasks.forgetting import ForgettingTask
from ovq.tasks.language_modeling import LanguageModelingTask
from ovq.tasks.mqar import MQARTask
from ovq.tasks.positional_recall import PositionalRecallTask
from ovq.tasks.recall import RecallTask
from ovq.tasks.regression import InContextRegressionTask

TASKS: dict[str, type[Task]] = {
    "recall": RecallTask,
    "positional_recall": PositionalRecallTask,
    "forgetting": ForgettingTask,
    "mqar": MQARTask,
    "regression": InContextRegressionTask,
    "language_modeling": LanguageModelingTask,
}


def task_to_dict(task: Task) -> dict[str, Any]:
    """The task's ``name`` in the registry and its fields, all of them plain values.

    Raises:
        ValueError: a task whose class is not in the registry.

    >>> task_to_dict(LanguageModelingTask(context_length=64))["name"]
    'language_modeling'
    """
    for name, cls in TASKS.items():
        if type(task) is cls:
            return {"name": name, **dataclasses.asdict(task)}
    raise ValueError(f"task must be one of {sorted(TASKS)}, got a {type(task).__name__}")


def task_from_dict(fields: Mapping[str, Any]) -> Task:
    """The task that :func:`task_to_dict` wrote; fields that are left out take their defaults.

    Raises:
        ValueError: an unknown name or field, or a field out of its range.
    """
    name = fields.get("name")
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(f"name must be one of {sorted(TASKS)}, got {name!r}")
    known = [field.name for field in dataclasses.fields(TASKS[name])]
    unknown = [field for field in fields if field not in ("name", *known)]
    if unknown:
        raise ValueError(f"fields of {name} must be among {known}, got {unknown[0]!r}")
    return TASKS[name](**{field: fields[field] for field in known if field in fields})
