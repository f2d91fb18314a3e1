"""Vocabularies of numbered tokens: their ids, and the names that texts write them by."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ovq.tasks.base import check_ids


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens, ids 0, 1, ..., and after them alphabets of numbered tokens, end to end.

    Attributes:
        special: names of the special tokens.
        alphabets: size of each alphabet, by the letter that names its tokens ``k0``, ``k1``, ...

    >>> vocabulary = Vocabulary(("<pad>", "?"), {"k": 4, "v": 2})
    >>> vocabulary.encode("k3 v0 ? k3"), vocabulary.decode([1, 2, 6])
    (tensor([5, 6, 1, 5]), '? k0 v0')
    """

    special: tuple[str, ...]
    alphabets: Mapping[str, int]

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self.special) + sum(self.alphabets.values())

    def bounds(self, letter: str) -> tuple[int, int]:
        """The first id of an alphabet, and the first one after it."""
        first = len(self.special)
        for other, size in self.alphabets.items():
            if other == letter:
                return first, first + size
            first += size
        raise KeyError(letter)

    def draw(
        self, letter: str, size: tuple[int, ...], generator: torch.Generator
    ) -> Int64[Tensor, "..."]:
        """Independent and uniform ids of an alphabet."""
        return torch.randint(*self.bounds(letter), size, generator=generator)

    def contains(self, letter: str, ids: Int64[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Which ids are of an alphabet."""
        first, end = self.bounds(letter)
        return (ids >= first) & (ids < end)

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of token names separated by white space.

        Raises:
            ValueError: a name that is not in the vocabulary.
        """
        return torch.tensor([self._id_of(name) for name in text.split()], dtype=torch.int64)

    def _id_of(self, name: str) -> int:
        if name in self.special:
            return self.special.index(name)
        match = re.fullmatch(r"([a-z])(0|[1-9][0-9]{0,17})", name)
        if match and int(match[2]) < self.alphabets.get(match[1], 0):
            return self.bounds(match[1])[0] + int(match[2])
        ranges = [f"{letter}0 to {letter}{size - 1}" for letter, size in self.alphabets.items()]
        *known, last = [*ranges, *reversed(self.special)]
        raise ValueError(
            f"text must hold only the token names {', '.join(known)} and {last}, got {name!r}"
        )

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The names of ids ``[T]``, separated by spaces.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return " ".join(self._name_of(number) for number in check_ids(ids, self.size))

    def _name_of(self, number: int) -> str:
        if number < len(self.special):
            return self.special[number]
        number -= len(self.special)
        for letter, size in self.alphabets.items():
            if number < size:
                return f"{letter}{number}"
            number -= size
        raise AssertionError(number)
