"""Forgetting: pairs of one distribution, then more and more of another, then questions on both."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ovq.tasks.alphabets import Vocabulary
from ovq.tasks.base import Split, check_split
from ovq.tasks.pairs import SPECIAL, PairTask, Part, in_each_kind


@dataclass(frozen=True, kw_only=True)
class ForgettingTask(PairTask):
    """Recall of what came first, after ``n`` tokens of something else. A reconstruction.

    One example, with ``first_length=8, context_length=16, later_tokens_per_pair=4, num_queries=1``
    (a and b keys, v values, f and g filler; a dot is the label -100):

                   |------ A -----------| |------ B: n = 8 ------|
        input_ids  f4 a3 v5 f1 f2 a9 v0 f0 g1 b7 v5 g0 b2 v3 g6 g1  ?  b2 v3 a3 v5
        labels      .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .   . v3  . v5

    The two parts have keys of their own, filler of their own and densities of their own; they share
    the values, so that the one can be taken for the other. Within the sequence no key comes twice.
    The questions about A and B are asked in random order, and :meth:`groups` tells them apart.
    ``with_length`` keeps A and lengthens B: by more pairs, or by filler alone with ``fixed_pairs``
    (of B). Without B (``context_length`` equal to ``first_length``) the score on A is that before
    anything is forgotten.

    Placement, splits and the other fields are those of :class:`~ovq.tasks.pairs.PairTask`.

    Attributes:
        context_length: tokens of both parts, ``first_length + n``.
        first_length: tokens of A.
        tokens_per_pair: tokens of A for each of its pairs.
        later_tokens_per_pair: tokens of B for each of its pairs.
        fixed_pairs: pairs of B, whatever its length and ``later_tokens_per_pair``.
        num_queries: pairs asked for in A, and in B as well if it has as many.
        num_keys: size of the alphabet of A's keys.
        num_later_keys: size of the alphabet of B's keys.
        num_filler: size of the alphabet of A's filler, even.
        num_later_filler: size of the alphabet of B's filler, even.

    Raises:
        ValueError: a field out of its range; too few keys for the pairs at the densest.

    >>> task = ForgettingTask(first_length=64, context_length=64 + 128)
    >>> example = task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)
    >>> {name: int(places.sum()) for name, places in task.groups(example).items()}
    {'A': 8, 'B': 8}
    """

    context_length: int = 256
    first_length: int = 128
    later_tokens_per_pair: int = 4
    num_later_keys: int = 256
    num_later_filler: int = 64

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.context_length < self.first_length:
            raise ValueError(
                f"context_length must be at least first_length = {self.first_length}, got "
                f"{self.context_length}"
            )

    def parts(self) -> tuple[Part, ...]:
        """A, and B if there are tokens of it."""
        first = Part(
            length=self.first_length,
            tokens_per_pair=self.tokens_per_pair,
            fixed_pairs=None,
            keys="a",
            names=("first_length", "tokens_per_pair", "num_keys"),
        )
        later = Part(
            length=self.context_length - self.first_length,
            tokens_per_pair=self.later_tokens_per_pair,
            fixed_pairs=self.fixed_pairs,
            keys="b",
            filler="g",
            names=("(context_length - first_length)", "later_tokens_per_pair", "num_later_keys"),
        )
        return (first, later) if later.length or later.num_pairs else (first,)

    @property
    def vocabulary(self) -> Vocabulary:
        """Pad 0, query marker 1, then A's keys, B's keys, the values, A's filler, B's filler."""
        return Vocabulary(
            SPECIAL,
            {
                "a": self.num_keys,
                "b": self.num_later_keys,
                "v": self.num_values,
                "f": self.num_filler,
                "g": self.num_later_filler,
            },
        )

    @property
    def _num_questions(self) -> int:
        return sum(min(self.num_queries, part.num_pairs) for part in self.parts())

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        contexts, asked, start = [], [], 0
        for part in self.parts():
            tokens, places = self._draw_unique_pairs(generator, part, progress)
            number = min(self.num_queries, part.num_pairs)
            chosen = torch.randperm(len(places), generator=generator)[:number]
            contexts.append(tokens)
            asked.append(start + places[chosen])
            start += part.length
        context, places = torch.cat(contexts), torch.cat(asked)
        self._fit_to_split(context, split)
        order = torch.randperm(len(places), generator=generator)
        return self._ask(context, context[places[order]])

    def groups(self, example: Mapping[str, Tensor]) -> dict[str, Bool[Tensor, " T"]]:
        """The answers about ``"A"`` and those about ``"B"``."""
        about_later = self.vocabulary.contains("b", self._questions(example["input_ids"])[:, 0])
        return in_each_kind({0: "A", 1: "B"}, self._spread(example, about_later.long()))
