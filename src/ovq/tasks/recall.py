"""Basic in-context recall: key-value pairs scattered in filler, then questions about the pairs."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ovq.tasks.base import (
    IGNORED,
    SomeTask,
    Split,
    Task,
    check_at_least,
    check_ids,
    check_progress,
    check_split,
)

PAD = 0
QUERY = 1
NUM_SPECIAL = 2
_NAMES = {"<pad>": PAD, "?": QUERY}


@dataclass(frozen=True, kw_only=True)
class RecallTask(Task):
    """In-context recall with unique keys. A reconstruction: the paper's own data is not published.

    One example, with ``context_length=12, tokens_per_pair=4, num_queries=2`` (k keys, v values,
    f filler; a dot is the label -100):

        input_ids  f4 k3 v5 f1 f2 f4 k9 v0 k7 v5 f0 f6  ?  k9 v0 k3 v5
        labels      .  .  .  .  .  .  .  .  .  .  .  .  .   . v0  . v5

    A pair is ``key_length`` key tokens and then ``value_length`` value tokens, contiguous. All
    placements of the pairs without overlap are equally likely; no two keys of a sequence are the
    same; values and filler are independent and uniform; the queries ask for pairs drawn without
    replacement. Labels stand at the values of the query block only.

    The splits cannot share a sequence: the ids of a context sum to an even number in training and
    to an odd one in evaluation. The last token of the context (filler or a value) sees to that: it
    changes places with its neighbour in its alphabet, so every sequence of a split is equally
    likely. The alphabets of values and filler are even for that reason.

    Attributes:
        context_length: tokens before the query marker; it must hold at least one pair.
        tokens_per_pair: context tokens for each pair, ``context_length // tokens_per_pair`` pairs.
        key_length: tokens of a key.
        value_length: tokens of a value.
        num_queries: pairs asked for, at most as many as there are pairs.
        num_keys: size of the alphabet of key tokens.
        num_values: size of the alphabet of value tokens, even.
        num_filler: size of the alphabet of filler tokens, even.
        initial_tokens_per_pair: context tokens for each pair at progress 0, from which they grow
            linearly to ``tokens_per_pair``; ``None`` for no curriculum.
        curriculum_fraction: progress at which ``tokens_per_pair`` is reached, in (0, 1].

    Raises:
        ValueError: a field out of its range; too few keys for the pairs at the densest.

    >>> task = RecallTask(context_length=12, tokens_per_pair=4, num_queries=2)
    >>> example = task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)
    >>> example["input_ids"].shape, int((example["labels"] != -100).sum())
    (torch.Size([17]), 2)
    """

    context_length: int = 128
    tokens_per_pair: int = 8
    key_length: int = 1
    value_length: int = 1
    num_queries: int = 8
    num_keys: int = 256
    num_values: int = 64
    num_filler: int = 64
    initial_tokens_per_pair: int | None = None
    curriculum_fraction: float = 0.5

    def __post_init__(self):
        lengths = ("context_length", "tokens_per_pair", "key_length", "value_length")
        for name in (*lengths, "num_queries", "num_keys", "num_values", "num_filler"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("num_values", "num_filler"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, got {getattr(self, name)}")
        self._check_density()
        fraction = self.curriculum_fraction
        if not isinstance(fraction, int | float) or not 0.0 < fraction <= 1.0:
            raise ValueError(f"curriculum_fraction must lie in (0, 1], got {fraction!r}")

    def _check_density(self) -> None:
        if self.tokens_per_pair < self._pair_length:
            raise ValueError(
                f"tokens_per_pair must be at least key_length + value_length = "
                f"{self._pair_length}, got {self.tokens_per_pair}"
            )
        initial = self.initial_tokens_per_pair
        if initial is not None:
            check_at_least("initial_tokens_per_pair", initial, self._pair_length)
        if initial is not None and initial > self.tokens_per_pair:
            raise ValueError(
                f"initial_tokens_per_pair must be at most tokens_per_pair = "
                f"{self.tokens_per_pair}, got {initial}"
            )
        if self.num_pairs < 1:
            raise ValueError(
                f"context_length must be at least tokens_per_pair = {self.tokens_per_pair}, "
                f"got {self.context_length}"
            )
        if self.num_queries > self.num_pairs:
            raise ValueError(
                f"num_queries must be at most context_length // tokens_per_pair = "
                f"{self.num_pairs} pairs, got {self.num_queries}"
            )
        most_pairs = self.num_pairs_at(0.0)
        if self.num_keys**self.key_length < most_pairs:
            raise ValueError(
                f"num_keys ** key_length must be at least the {most_pairs} pairs of the densest "
                f"context of {self.context_length} tokens, got {self.num_keys**self.key_length}"
            )

    @property
    def _pair_length(self) -> int:
        return self.key_length + self.value_length

    @property
    def _first_value(self) -> int:
        return NUM_SPECIAL + self.num_keys

    @property
    def _first_filler(self) -> int:
        return NUM_SPECIAL + self.num_keys + self.num_values

    @property
    def vocab_size(self) -> int:
        """Pad 0, query marker 1, then the alphabets of keys, values and filler in this order."""
        return self._first_filler + self.num_filler

    @property
    def sequence_length(self) -> int:
        """The context, the query marker, and key and value of every query."""
        return self.context_length + 1 + self.num_queries * self._pair_length

    @property
    def num_pairs(self) -> int:
        """Pairs of a context once the curriculum is over."""
        return self.context_length // self.tokens_per_pair

    @property
    def chance(self) -> float:
        """Share of value tokens right by a guess among all values, ``1 / num_values``."""
        return 1.0 / self.num_values

    @property
    def context_chance(self) -> float:
        """Share right by answering with the value of any one pair of the context: no recall yet."""
        return 1.0 / self.num_pairs + (1.0 - 1.0 / self.num_pairs) / self.num_values

    def num_pairs_at(self, progress: float) -> int:
        """Pairs of a context at a progress of training in [0, 1]."""
        check_progress(progress)
        if self.initial_tokens_per_pair is None:
            return self.num_pairs
        share = min(1.0, progress / self.curriculum_fraction)
        thinned = share * (self.tokens_per_pair - self.initial_tokens_per_pair)
        return int(self.context_length / (self.initial_tokens_per_pair + thinned))

    def without_curriculum(self: SomeTask) -> SomeTask:
        """The same task at its final density throughout."""
        return dataclasses.replace(self, initial_tokens_per_pair=None)

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        num_pairs, size = self.num_pairs_at(progress), (self.context_length,)
        context = torch.randint(self._first_filler, self.vocab_size, size, generator=generator)
        places = self._draw_places(generator, num_pairs)  # [num_pairs, key_length + value_length]
        keys = self._draw_keys(generator, num_pairs)
        size = (num_pairs, self.value_length)
        values = torch.randint(
            self._first_value, self._first_filler, size, generator=generator
        )  # [num_pairs, value_length]
        context[places] = torch.cat([keys, values], dim=1)
        self._fit_to_split(context, split)

        asked = torch.randperm(num_pairs, generator=generator)[: self.num_queries]
        block = context[places[asked]]  # [num_queries, key_length + value_length]
        answers = block.clone()
        answers[:, : self.key_length] = IGNORED
        input_ids = torch.cat([context, torch.tensor([QUERY]), block.flatten()])
        labels = torch.full_like(input_ids, IGNORED)
        labels[self.context_length + 1 :] = answers.flatten()
        return {"input_ids": input_ids, "labels": labels}

    def _draw_places(self, generator: torch.Generator, num_pairs: int) -> Int64[Tensor, "P L"]:
        """Positions of the tokens of every pair, all placements without overlap equally likely."""
        # Shrunk to one token each, pairs are a subset of what remains of the context.
        shrunk = self.context_length - num_pairs * (self._pair_length - 1)
        starts = torch.randperm(shrunk, generator=generator)[:num_pairs].sort().values
        starts += torch.arange(num_pairs) * (self._pair_length - 1)
        return starts[:, None] + torch.arange(self._pair_length)

    def _draw_keys(self, generator: torch.Generator, num_pairs: int) -> Int64[Tensor, "P L"]:
        """Token ids of distinct keys, drawn uniformly without replacement."""
        num_possible = self.num_keys**self.key_length
        if num_possible <= max(4096, 4 * num_pairs):
            codes = torch.randperm(num_possible, generator=generator)[:num_pairs]
            digits = codes[:, None] // self.num_keys ** torch.arange(self.key_length)
            return NUM_SPECIAL + digits % self.num_keys
        size = (num_pairs, self.key_length)
        keys: dict[tuple[int, ...], None] = {}  # a set that keeps the order of the draws
        while len(keys) < num_pairs:
            draws = torch.randint(self.num_keys, size, generator=generator).tolist()
            keys |= dict.fromkeys(map(tuple, draws))
        return NUM_SPECIAL + torch.tensor(list(keys)[:num_pairs])

    def _fit_to_split(self, context: Int64[Tensor, " T"], split: Split) -> None:
        """Change the last token, if need be, to give the sum of the ids the split's parity."""
        if int(context.sum()) % 2 == (split is Split.EVALUATE):
            return
        last = int(context[-1])
        first = self._first_filler if last >= self._first_filler else self._first_value
        context[-1] = first + ((last - first) ^ 1)

    def solve(self, input_ids: Int64[Tensor, " T"]) -> Int64[Tensor, " T"]:
        """Answer the queries by looking the keys up in the context: an oracle, right every time.

        Args:
            input_ids: one example ``[T]``; the values of its query block are not read.

        Returns:
            The answers where the labels have them, -100 elsewhere, ``[T]`` int64.
        """
        context, block = input_ids[: self.context_length], input_ids[self.context_length + 1 :]
        is_key = (context >= NUM_SPECIAL) & (context < self._first_value)
        places = is_key.nonzero().flatten().view(-1, self.key_length)  # of the key tokens
        asked = block.view(self.num_queries, self._pair_length)[:, : self.key_length]
        found = (asked[:, None] == context[places]).all(dim=-1).int().argmax(dim=1)
        values = places[found, -1:] + 1 + torch.arange(self.value_length)
        answers = torch.full_like(input_ids, IGNORED)
        answers[self.context_length + 1 :].view(-1, self._pair_length)[:, self.key_length :] = (
            context[values]
        )
        return answers

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of token names separated by white space, such as ``f12 k3 v5 ? k3``.

        Raises:
            ValueError: a name outside ``k0``, ``k1``, ... (keys), ``v0``, ... (values), ``f0``, ...
                (filler), ``?`` (the query marker) and ``<pad>``.
        """
        return torch.tensor([self._id_of(name) for name in text.split()], dtype=torch.int64)

    def _alphabets(self) -> dict[str, tuple[int, int]]:
        """First id and size of each alphabet, by the letter that names its tokens."""
        return {
            "k": (NUM_SPECIAL, self.num_keys),
            "v": (self._first_value, self.num_values),
            "f": (self._first_filler, self.num_filler),
        }

    def _id_of(self, name: str) -> int:
        if name in _NAMES:
            return _NAMES[name]
        match = re.fullmatch(r"([kvf])(0|[1-9][0-9]{0,17})", name)
        if match:
            first, size = self._alphabets()[match[1]]
            if int(match[2]) < size:
                return first + int(match[2])
        known = ", ".join(f"{k}0 to {k}{size - 1}" for k, (_, size) in self._alphabets().items())
        raise ValueError(f"text must hold only the token names {known}, ? and <pad>, got {name!r}")

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The token names of ids ``[T]``, separated by spaces."""
        special = {number: name for name, number in _NAMES.items()}
        names = []
        for number in check_ids(ids, self.vocab_size):
            for letter, (first, size) in self._alphabets().items():
                if first <= number < first + size:
                    names.append(f"{letter}{number - first}")
            if number in special:
                names.append(special[number])
        return " ".join(names)
