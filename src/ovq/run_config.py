"""What a run is: a task, a model, its training and its evaluation, as frozen values."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

import ovq
from ovq.models import OVQConfig, OVQForCausalLM, OVQForRegression, OVQRegressionConfig
from ovq.tasks import ContinuousTask, Task, task_from_dict, task_to_dict, token_task
from ovq.tasks.corpus import KJV


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    Attributes:
        num_steps: optimizer steps.
        batch_size: sequences a step.
        learning_rate: peak, reached after ``warmup_steps``, then a cosine to zero.
        warmup_steps: steps of linear warm-up.
        weight_decay: of AdamW, not applied to norms and biases.
        adam_beta2: of AdamW, in [0, 1): how long squared gradients are remembered. Tokens that come
            rarely need long.
        curriculum: whether the task grows harder over the run, as it defines.
        save_every: steps between checkpoints.
        seed: of weights and data.
        frozen: parameters that keep their initial values, by the last part of their names, such as
            ``log_beta``.
        identity_fraction: progress, in [0, 1), up to which the layers that start as the identity
            (``num_identity_layers`` of the model) stay so; those above learn first.
        short_length: context length at which training begins, a divisor of the task's; ``None`` for
            the task's. A sequence is then as many short ones as have its tokens.
        short_fraction: progress, in [0, 1], at which the contexts have the task's length.
        accumulation_steps: parts of a step's sequences that are taken one after the other, to save
            memory.
        bf16: whether products are in bfloat16 (autocast).
        gradient_checkpointing: whether layers run once more in the backward, to save memory.

    Raises:
        ValueError: an ``adam_beta2``, or a share of training, out of its range.
    """

    num_steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int = 100
    weight_decay: float = 0.0
    adam_beta2: float = 0.95
    curriculum: bool = False
    save_every: int = 250
    seed: int = 0
    frozen: tuple[str, ...] = ()
    identity_fraction: float = 0.0
    short_length: int | None = None
    short_fraction: float = 0.5
    accumulation_steps: int = 1
    bf16: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self):
        if not 0.0 <= self.adam_beta2 < 1.0:
            raise ValueError(f"adam_beta2 must lie in [0, 1), got {self.adam_beta2}")
        if not 0.0 <= self.identity_fraction < 1.0:
            raise ValueError(f"identity_fraction must lie in [0, 1), got {self.identity_fraction}")
        if not 0.0 <= self.short_fraction <= 1.0:
            raise ValueError(f"short_fraction must lie in [0, 1], got {self.short_fraction}")

    @property
    def num_short_steps(self) -> int:
        """Steps with contexts of ``short_length``."""
        return 0 if self.short_length is None else round(self.short_fraction * self.num_steps)


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
        model: fields of :class:`~ovq.models.OVQConfig`; the vocabulary, or the numbers that go in
            and out, are the task's.
        training: how.
        evaluation: what is measured afterwards.
    """

    name: str
    task: Task
    model: dict[str, Any]
    training: TrainingConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @cached_property
    def stages(self) -> tuple[tuple[int, int, Task], ...]:
        """The steps of each length in turn: how many, examples a sequence, and their task.

        Raises:
            ValueError: a ``short_length`` at which there is no such task.
        """
        training, short_steps = self.training, self.training.num_short_steps
        long = (training.num_steps - short_steps, 1, self.task)
        if training.short_length is None:
            return (long,)
        parts = self.task.context_length // training.short_length
        return (short_steps, parts, self.task.with_length(training.short_length)), long

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the run file."""
        return {
            "name": self.name,
            "task": task_to_dict(self.task),
            "model": self.model,
            "training": asdict(self.training) | {"frozen": list(self.training.frozen)},
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
            evaluation, training = fields["evaluation"], fields["training"]
            return cls(
                name=fields["name"],
                task=task_from_dict(fields["task"]),
                model=fields["model"],
                training=TrainingConfig(**training | {"frozen": tuple(training.get("frozen", ()))}),
                evaluation=EvaluationConfig(
                    lengths=tuple(evaluation["lengths"]),
                    num_centroids=tuple(evaluation["num_centroids"]),
                    num_sequences=evaluation["num_sequences"],
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"config must hold the fields of a RunConfig: {error}") from None

    def check_is_of(self, run: Mapping[str, Any], folder: Path) -> None:
        """Raise unless a run is of this configuration, its name and its evaluation apart.

        Args:
            run: what its run file holds.
            folder: of the run, for the message.

        Raises:
            ValueError: a field that differs; one that is not given has its default.
        """
        ours, theirs = (_in_full(c) for c in (self, RunConfig.from_dict(run["config"])))
        for part in ("task", "model", "training"):
            for name in sorted(ours[part].keys() | theirs[part].keys()):
                own, found = ours[part].get(name), theirs[part].get(name)
                if own != found and not (name == "source" and _same_folder(own, found)):
                    raise ValueError(
                        f"--output must be a folder without a run of another configuration, got "
                        f"{folder} with {part}.{name} = {found!r}, not {own!r}"
                    )


def _in_full(config: RunConfig) -> dict[str, Any]:
    """All fields, those of the model with their defaults, too."""
    return config.to_dict() | {"model": model_config(config.task, config.model).to_dict()}


def _same_folder(one: Any, other: Any) -> bool:
    """Whether two sources are one folder, with and without a slash at the end, say."""
    names = [name for name in (one, other) if isinstance(name, str) and name != KJV]
    return len(names) == 2 and Path(names[0]).resolve() == Path(names[1]).resolve()


def model_class(task: Task) -> type[OVQForCausalLM] | type[OVQForRegression]:
    """The class of the models that learn a task."""
    return OVQForRegression if isinstance(task, ContinuousTask) else OVQForCausalLM


def model_config(task: Task, fields: dict[str, Any]) -> OVQConfig:
    """The configuration of a model of these fields whose ends fit a task.

    Raises:
        ValueError: a field out of its range.
    """
    if isinstance(task, ContinuousTask):
        ends = {"num_inputs": task.num_inputs, "num_outputs": task.num_outputs}
        return OVQRegressionConfig(**ends, **fields)
    return OVQConfig(vocab_size=token_task(task).vocab_size, **fields)


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
