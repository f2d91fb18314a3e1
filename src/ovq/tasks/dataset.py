"""The examples of a task as a dataset, each of them fixed by its number."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ovq.tasks.base import Split, Task, check_at_least, check_seed, check_split


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
        """Example ``index``, as the task's :meth:`~ovq.tasks.base.Task.example` returns it."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"index must lie in [0, {self.num_sequences}), got {index}")
        progress = index / self.num_sequences if self.curriculum else 1.0
        return self.task.example(self._generator(index), split=self.split, progress=progress)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The examples at ``indices``, stacked: each tensor of an example as ``[B, T, ...]``."""
        examples = [self[index] for index in indices]
        return {name: torch.stack([each[name] for each in examples]) for name in examples[0]}


class ShortFirst(Dataset[list[dict[str, Tensor]]]):
    """The training sequences of a task, of which the first are at a shorter context length.

    An item is a list of examples with about the same number of tokens in all: one at the task's
    length, or as many short ones as make up for it. All of them are drawn at the progress of their
    item, and no two by one generator.

    Args:
        task: draws the examples.
        num_sequences: items in the dataset.
        num_short: how many of them, from the start on, are short.
        short_length: context length of these, a divisor of the task's.
        seed: any integer.
        split: the half of the data to draw from.
        curriculum: whether the task grows harder, see :class:`TaskDataset`.

    Raises:
        ValueError: a number out of its range; a ``short_length`` at which there is no such task.

    >>> from ovq.tasks import RecallTask, Split
    >>> dataset = ShortFirst(
    ...     RecallTask(context_length=512), num_sequences=2, num_short=1, short_length=128,
    ...     seed=0, split=Split.TRAIN,
    ... )  # fmt: skip
    >>> [[example["input_ids"].numel() for example in item] for item in dataset]
    [[145, 145, 145, 145], [529]]
    """

    def __init__(
        self,
        task: Task,
        *,
        num_sequences: int,
        num_short: int,
        short_length: int,
        seed: int,
        split: Split,
        curriculum: bool = False,
    ):
        check_at_least("num_sequences", num_sequences, 1)
        check_at_least("short_length", short_length, 1)
        if not 0 <= num_short <= num_sequences:
            raise ValueError(f"num_short must lie in [0, {num_sequences}], got {num_short}")
        if task.context_length % short_length:
            raise ValueError(
                f"short_length must divide context_length = {task.context_length}, got "
                f"{short_length}"
            )
        self.num_sequences, self.num_short = num_sequences, num_short
        self.parts = task.context_length // short_length
        # Both number their examples alike, so that the long ones begin where the short ones end.
        self.long, self.short = (
            TaskDataset(
                each, num_sequences=self.parts * num_sequences, seed=seed, split=split,
                curriculum=curriculum,
            )
            for each in (task, task.with_length(short_length))
        )  # fmt: skip

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> list[dict[str, Tensor]]:
        """The examples of item ``index``."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"index must lie in [0, {self.num_sequences}), got {index}")
        first = index * self.parts
        if index >= self.num_short:
            return [self.long[first]]
        return [self.short[first + part] for part in range(self.parts)]
