"""What every task is: a frozen configuration that draws examples from a ``torch.Generator``.

One class, one file, one line in the registry (:mod:`ovq.tasks.registry`). Tasks are of two kinds,
sequences of tokens with labels and sequences of numbers with targets. The contracts below are held
by one test suite that runs over every registry entry.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

# Hugging Face's label of a token that the model is not asked to predict.
IGNORED = -100

# The checkers of shapes under pytest do not read ``typing.Self``.
SomeTask = TypeVar("SomeTask", bound="Task")


class Split(Enum):
    """The two halves of a task's data, which never share a sequence."""

    TRAIN = "train"
    EVALUATE = "evaluate"


def check_at_least(name: str, value: object, minimum: int) -> None:
    """Raise a ``ValueError`` unless the argument called ``name`` is an integer >= ``minimum``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def check_split(split: object) -> None:
    """Raise a ``ValueError`` unless this is a :class:`Split`; its name is none."""
    if not isinstance(split, Split):
        raise ValueError(f"split must be one of {[str(s) for s in Split]}, got {split!r}")


def check_seed(seed: object, limit: int | None = None) -> None:
    """Raise a ``ValueError`` unless this is an integer, in [0, ``limit``) if there is one."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    if limit is not None and not 0 <= seed < limit:
        raise ValueError(f"seed must lie in [0, 2^{limit.bit_length() - 1}), got {seed}")


def check_progress(progress: float) -> None:
    """Raise a ``ValueError`` unless the progress of training lies in [0, 1]."""
    if not isinstance(progress, int | float) or not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must lie in [0, 1], got {progress!r}")


def check_curriculum_fraction(fraction: float, name: str = "curriculum_fraction") -> None:
    """Raise a ``ValueError`` unless a curriculum ends within training, in (0, 1]."""
    if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {fraction!r}")


def share_of_curriculum(progress: float, fraction: float) -> float:
    """How much of a curriculum is over, in [0, 1], if it ends at that fraction of training."""
    check_progress(progress)
    return min(1.0, progress / fraction)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of sequences with questions; a configuration that holds no data of its own.

    The contract: an example is fixed by the generator, the split and the progress alone; all
    examples of one task have the same tensors of the same shapes; the splits never share a
    sequence (tasks on real text: never a place in the text, which may repeat itself).

    A task is a :class:`TokenTask` or a :class:`ContinuousTask`, which say what an example holds.

    Attributes:
        context_length: places of the context, at least 1. Queries follow it, if a task has them.
    """

    context_length: int

    @property
    def sequence_length(self) -> int:
        """Places of one example: the context and the query block, if there is one."""
        return self.context_length

    @abstractmethod
    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example.

        Args:
            generator: the only source of randomness, on the CPU.
            split: the half of the data to draw from.
            progress: how far training is, in [0, 1]; tasks with a curriculum are easier below 1.

        Returns:
            Tensors by name, the first axis of each ``sequence_length`` long.

        Raises:
            ValueError: ``progress`` outside [0, 1], or a ``split`` that is no :class:`Split`.
        """

    @abstractmethod
    def asked(self, example: Mapping[str, Tensor]) -> Bool[Tensor, " T"]:
        """The places of an example for which the model is asked something, ``[T]`` bool."""

    def groups(self, example: Mapping[str, Tensor]) -> dict[str, Bool[Tensor, " T"]]:
        """Kinds of questions, by name, whose scores are worth reporting apart.

        Args:
            example: as :meth:`example` drew it.

        Returns:
            For each kind, which of the :meth:`asked` places are of it, ``[T]`` bool; every asked
            place is of one kind. None by default: then there is one score. A kind that no place of
            this example is of may be missing.
        """
        return {}

    def with_length(self: SomeTask, context_length: int) -> SomeTask:
        """The same task at another context length, with the same density of what is asked for."""
        return dataclasses.replace(self, context_length=context_length)

    def without_curriculum(self: SomeTask) -> SomeTask:
        """The task as the end of training shows it, whatever the progress.

        What a curriculum starts from is in fields named ``initial_...``, ``None`` without one.
        """
        names = [f.name for f in dataclasses.fields(self) if f.name.startswith("initial_")]
        return dataclasses.replace(self, **dict.fromkeys(names)) if names else self

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """``bytes`` and ``sha256`` of each file that the task reads, by name; none by default."""
        return {}

    def prepare(self) -> None:
        """Load what the task reads from disk, so that bad sources raise here and not midway."""
        return


@dataclass(frozen=True, kw_only=True)
class TokenTask(Task):
    """A task on token ids.

    An example holds ``input_ids`` ``[T]`` int64, and ``labels`` ``[T]`` int64: -100, or the id that
    the model is asked to predict for that place from the tokens before it. The model does the
    shift. It is the place's own id, unless the task says that the sequence goes on otherwise.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids; every id of an example lies in ``[0, vocab_size)``."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Share of labelled tokens that a guess without reading the sequence gets right."""

    def asked(self, example: Mapping[str, Tensor]) -> Bool[Tensor, " T"]:
        """The places with a label, ``[T]`` bool."""
        return example["labels"] != IGNORED

    @abstractmethod
    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The token ids of a text, ``[T]`` int64.

        Raises:
            ValueError: the text holds something the vocabulary lacks.
        """

    @abstractmethod
    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The text of token ids ``[T]``.

        Raises:
            ValueError: an id outside ``[0, vocab_size)``.
        """


@dataclass(frozen=True, kw_only=True)
class ContinuousTask(Task):
    """A task on vectors of numbers.

    An example holds ``inputs`` ``[T, num_inputs]`` float32, and ``targets`` ``[T, num_outputs]``
    float32: the numbers that the model is asked to give at that very place (there is no shift), or
    NaN in the whole row. Targets are scaled so that zeros have a mean squared error of 1.
    """

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Numbers that the model is given at each place."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers that the model is asked for at a place."""

    def asked(self, example: Mapping[str, Tensor]) -> Bool[Tensor, " T"]:
        """The places with a target, ``[T]`` bool."""
        return ~example["targets"].isnan().any(dim=-1)


def token_task(task: Task) -> TokenTask:
    """The task itself, for uses that need tokens.

    Raises:
        ValueError: a task without tokens.
    """
    if not isinstance(task, TokenTask):
        raise ValueError(f"task must be one on tokens, got {type(task).__name__}")
    return task


def check_ids(ids: Int64[Tensor, " T"] | Sequence[int], vocab_size: int) -> list[int]:
    """The token ids as a list; raises a ``ValueError`` if one lies outside ``[0, vocab_size)``."""
    numbers = torch.as_tensor(ids).tolist()
    for number in numbers:
        if not 0 <= number < vocab_size:
            raise ValueError(f"ids must lie in [0, {vocab_size}), got {number}")
    return numbers
