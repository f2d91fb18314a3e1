"""Tasks: what models are trained on and asked about. All of them are reconstructions."""

from ovq.tasks.base import IGNORED, Split, Task, TaskDataset, check_seed
from ovq.tasks.corpus import held_out_split, read_corpus
from ovq.tasks.language_modeling import LanguageModelingTask
from ovq.tasks.recall import RecallTask
from ovq.tasks.registry import TASKS, task_from_dict, task_to_dict

__all__ = [
    "IGNORED",
    "TASKS",
    "LanguageModelingTask",
    "RecallTask",
    "Split",
    "Task",
    "TaskDataset",
    "check_seed",
    "held_out_split",
    "read_corpus",
    "task_from_dict",
    "task_to_dict",
]
