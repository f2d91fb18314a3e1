"""What every task is: a frozen configuration that draws examples from a ``torch.Generator``.

One class, one file, one line in the registry (:mod:`ovq.tasks.registry`). The contract below is
held by one test suite that runs over every registry entry.
"""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import Dataset

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


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A source of token sequences with labels; a configuration that holds no data of its own.

    The contract: an example is fixed by the generator, the split and the progress alone; all
    examples of one task have the same length; the splits never share a sequence (tasks on real
    text: never a place in the text, which may repeat itself).

    Attributes:
        context_length: tokens of the context, at least 1. Queries follow it, if a task has them.
    """

    context_length: int

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids; every id of an example lies in ``[0, vocab_size)``."""

    @property
    def sequence_length(self) -> int:
        """Tokens of one example: the context and the query block, if there is one."""
        return self.context_length

    @property
    @abstractmethod
    def chance(self) -> float:
        """Share of labelled tokens that a guess without reading the sequence gets right."""

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
            ``input_ids`` ``[T]`` int64, and ``labels`` ``[T]`` int64: the token's own id where the
            model is asked to predict it, -100 elsewhere. The model does the shift.

        Raises:
            ValueError: ``progress`` outside [0, 1], or a ``split`` that is no :class:`Split`.
        """

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

    def with_length(self: SomeTask, context_length: int) -> SomeTask:
        """The same task at another context length, with the same density of what is asked for."""
        return dataclasses.replace(self, context_length=context_length)

    def without_curriculum(self: SomeTask) -> SomeTask:
        """The task as the end of training shows it, whatever the progress."""
        return self

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """``bytes`` and ``sha256`` of each file that the task reads, by name; none by default."""
        return {}

    def prepare(self) -> None:
        """Load what the task reads from disk, so that bad sources raise here and not midway."""
        return


def check_ids(ids: Int64[Tensor, " T"] | Sequence[int], vocab_size: int) -> list[int]:
    """The token ids as a list; raises a ``ValueError`` if one lies outside ``[0, vocab_size)``."""
    numbers = torch.as_tensor(ids).tolist()
    for number in numbers:
        if not 0 <= number < vocab_size:
            raise ValueError(f"ids must lie in [0, {vocab_size}), got {number}")
    return numbers


def _mix(word: int) -> int:
    """A bijection of the 32-bit integers whose output bits each depend on all input bits.

    Source: the finalizer of MurmurHash3 (public domain).
    """
    word = (word ^ (word >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ (word >> 16)


class TaskDataset(Dataset[dict[str, Tensor]]):
    """The examples of a task as a map-style dataset.

    Item ``i`` depends on ``(seed, split, i)`` alone (and on the task and, with a curriculum, on
    ``i / num_sequences``), so it is the same in any order, in any worker and after a restart.

    Args:
        task: draws the examples.
        num_sequences: items in the dataset, at least 1 and below 2^32.
        seed: any integer.
        split: the half of the data to draw from.
        curriculum: item ``i`` is drawn at progress ``i / num_sequences`` instead of 1; then the
            items are meant to be read in order.

    Raises:
        ValueError: ``num_sequences`` out of its range, a ``seed`` that is no integer, or a
            ``split`` that is no :class:`Split`.

    >>> from ovq.tasks import RecallTask, Split, TaskDataset
    >>> dataset = TaskDataset(RecallTask(), num_sequences=4, seed=0, split=Split.TRAIN)
    >>> dataset.batch([0, 1])["input_ids"].shape
    torch.Size([2, 145])
    """

    def __init__(
        self, task: Task, *, num_sequences: int, seed: int, split: Split, curriculum: bool = False
    ):
        check_at_least("num_sequences", num_sequences, 1)
        if num_sequences >= 2**32:
            raise ValueError(f"num_sequences must be below 2^32, got {num_sequences}")
        check_seed(seed)
        check_split(split)
        self.task = task
        self.num_sequences = num_sequences
        self.seed = seed
        self.split = split
        self.curriculum = curriculum
        digest = hashlib.blake2b(f"{split.value} {seed}".encode(), digest_size=8).digest()
        self._keys = (int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big"))

    def __len__(self) -> int:
        return self.num_sequences

    def _generator(self, index: int) -> torch.Generator:
        # PyTorch's CPU generator reads 32 bits of a seed. A keyed permutation of the index uses
        # them up without two items of one dataset ever meeting, as hashed seeds would.
        return torch.Generator().manual_seed(_mix(_mix(index ^ self._keys[0]) ^ self._keys[1]))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Example ``index``: ``input_ids`` and ``labels``, both ``[T]`` int64."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"index must lie in [0, {self.num_sequences}), got {index}")
        progress = index / self.num_sequences if self.curriculum else 1.0
        return self.task.example(self._generator(index), split=self.split, progress=progress)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The examples at ``indices``, stacked: ``input_ids`` and ``labels``, both ``[B, T]``."""
        examples = [self[index] for index in indices]
        return {
            name: torch.stack([example[name] for example in examples])
            for name in ("input_ids", "labels")
        }
