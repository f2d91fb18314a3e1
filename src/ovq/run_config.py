"""What a run is: a task, a model, its training and its evaluation, as frozen values."""

import platform
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

import ovq
from ovq.tasks import Task, task_from_dict, task_to_dict


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    Attributes:
        num_steps: optimizer steps.
        batch_size: sequences a step.
        learning_rate: peak, reached after ``warmup_steps``, then a cosine to zero.
        warmup_steps: steps of linear warm-up.
        weight_decay: of AdamW, not applied to norms and biases.
        curriculum: whether the task grows harder over the run, as it defines.
        save_every: steps between checkpoints.
        seed: of weights and data.
    """

    num_steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.0
    curriculum: bool = False
    save_every: int = 250
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What ``ovq evaluate`` measures when it is not told otherwise.

    Attributes:
        lengths: context lengths; empty for the trained one.
        num_centroids: slots, as numbers or as fractions of the context such as ``T/4``; empty for
            the trained number. Models without a dictionary ignore it.
        num_sequences: sequences at each setting.
    """

    lengths: tuple[int, ...] = ()
    num_centroids: tuple[str, ...] = ()
    num_sequences: int = 64


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a task, a model, how it is trained and how it is evaluated.

    Attributes:
        name: of the recipe; the run folder is called so by default.
        task: what is learned.
        model: fields of :class:`~ovq.models.OVQConfig`; the vocabulary is the task's.
        training: how.
        evaluation: what is measured afterwards.
    """

    name: str
    task: Task
    model: dict[str, Any]
    training: TrainingConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the run file."""
        return {
            "name": self.name,
            "task": task_to_dict(self.task),
            "model": self.model,
            "training": asdict(self.training),
            "evaluation": {
                "lengths": list(self.evaluation.lengths),
                "num_centroids": list(self.evaluation.num_centroids),
                "num_sequences": self.evaluation.num_sequences,
            },
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RunConfig":
        """What :meth:`to_dict` wrote.

        Raises:
            ValueError: a field that is missing, unknown or out of its range.
        """
        try:
            evaluation = fields["evaluation"]
            return cls(
                name=fields["name"],
                task=task_from_dict(fields["task"]),
                model=fields["model"],
                training=TrainingConfig(**fields["training"]),
                evaluation=EvaluationConfig(
                    lengths=tuple(evaluation["lengths"]),
                    num_centroids=tuple(evaluation["num_centroids"]),
                    num_sequences=evaluation["num_sequences"],
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"config must hold the fields of a RunConfig: {error}") from None


def environment() -> dict[str, Any]:
    """Versions and machine, for the run file."""
    return {
        "versions": {
            "ovq": ovq.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }
