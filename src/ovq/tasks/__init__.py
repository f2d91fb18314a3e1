"""Tasks: what models are trained on and asked about. All of them are reconstructions."""

from ovq.tasks.base import (
    IGNORED,
    ContinuousTask,
    Split,
    Task,
    TokenTask,
    check_seed,
    token_task,
)
from ovq.tasks.corpus import held_out_split, read_corpus
from ovq.tasks.dataset import ShortFirst, TaskDataset
from ovq.tasks.forgetting import ForgettingTask
from ovq.tasks.language_modeling import LanguageModelingTask
from ovq.tasks.mqar import MQARTask
from ovq.tasks.positional_recall import PositionalRecallTask
from ovq.tasks.recall import RecallTask
from ovq.tasks.registry import TASKS, task_from_dict, task_to_dict
from ovq.tasks.regression import InContextRegressionTask

__all__ = [
    "IGNORED",
    "TASKS",
    "ContinuousTask",
    "ForgettingTask",
    "InContextRegressionTask",
    "LanguageModelingTask",
    "MQARTask",
    "PositionalRecallTask",
    "RecallTask",
    "ShortFirst",
    "Split",
    "Task",
    "TaskDataset",
    "TokenTask",
    "check_seed",
    "held_out_split",
    "read_corpus",
    "task_from_dict",
    "task_to_dict",
    "token_task",
]
