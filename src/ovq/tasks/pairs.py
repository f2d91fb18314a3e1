"""What tasks on key-value pairs share: alphabets, density, placement, splits, the query block."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ovq.tasks.alphabets import Vocabulary
from ovq.tasks.base import (
    IGNORED,
    Split,
    TokenTask,
    check_at_least,
    check_curriculum_fraction,
    share_of_curriculum,
)
from ovq.tasks.draws import draw_numerals, draw_places

PAD = 0
QUERY = 1
SPECIAL = ("<pad>", "?")

SomePairTask = TypeVar("SomePairTask", bound="PairTask")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a context in which pairs lie scattered in filler.

    Attributes:
        length: tokens.
        tokens_per_pair: tokens for each pair, unless ``fixed_pairs`` are given.
        fixed_pairs: pairs, whatever the length.
        keys: letter of the alphabet of its keys.
        filler: letter of the alphabet of its filler.
        names: what the task calls ``length``, ``tokens_per_pair`` and the number of keys.
    """

    length: int
    tokens_per_pair: int
    fixed_pairs: int | None
    keys: str = "k"
    filler: str = "f"
    names: tuple[str, str, str] = ("context_length", "tokens_per_pair", "num_keys")

    @property
    def num_pairs(self) -> int:
        """Pairs once the curriculum is over."""
        return self.length // self.tokens_per_pair if self.fixed_pairs is None else self.fixed_pairs

    @property
    def final_tokens_per_pair(self) -> float:
        """Tokens for each pair once the curriculum is over."""
        if self.fixed_pairs is None:
            return float(self.tokens_per_pair)
        return self.length / self.fixed_pairs

    def num_pairs_at(self, share: float, initial_tokens_per_pair: int | None) -> int:
        """Pairs at a share, in [0, 1], of the way from the initial to the final density."""
        initial = initial_tokens_per_pair
        if initial is None:
            return self.num_pairs
        thinned = initial + share * (self.final_tokens_per_pair - initial)
        return max(self.num_pairs, int(self.length / thinned))


@dataclass(frozen=True, kw_only=True)
class PairTask(TokenTask):
    """Pairs scattered in filler, a query marker, and a block of questions with their answers.

    A pair is ``key_length`` key tokens and then ``value_length`` value tokens, contiguous. All
    placements of the pairs without overlap are equally likely; filler is independent and uniform.
    Labels stand at the values of the query block only.

    The splits cannot share a sequence: the ids of a context sum to an even number in training and
    to an odd one in evaluation. The last token of the context (filler or a value) sees to that: it
    changes places with its neighbour in its alphabet, so every sequence of a split is equally
    likely. The alphabets of values and filler are even for that reason.

    Length grows in two ways. ``with_length`` keeps ``tokens_per_pair``, so that pairs grow with it;
    with ``fixed_pairs``, which :meth:`with_pairs_fixed` sets, the pairs stay and filler grows.

    Attributes:
        context_length: tokens before the query marker.
        tokens_per_pair: context tokens for each pair, ``context_length // tokens_per_pair`` pairs.
        fixed_pairs: pairs of the context, whatever its length and ``tokens_per_pair``.
        key_length: tokens of a key.
        value_length: tokens of a value.
        num_queries: pairs asked for, at most as many as there are pairs.
        num_keys: size of the alphabet of key tokens.
        num_values: size of the alphabet of value tokens, even.
        num_filler: size of the alphabet of filler tokens, even.
        initial_tokens_per_pair: context tokens for each pair at progress 0, from which they grow
            linearly to what they are in the end; ``None`` for no curriculum.
        curriculum_fraction: progress at which they are that, in (0, 1].

    Raises:
        ValueError: a field out of its range; too few keys for the pairs at the densest.
    """

    context_length: int = 128
    tokens_per_pair: int = 8
    fixed_pairs: int | None = None
    key_length: int = 1
    value_length: int = 1
    num_queries: int = 8
    num_keys: int = 256
    num_values: int = 64
    num_filler: int = 64
    initial_tokens_per_pair: int | None = None
    curriculum_fraction: float = 0.5

    # Ids that stand before every context.
    _head: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self):
        self._check_sizes()
        for part in self.parts():
            self._check_part(part)
        self._check_queries()

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            optional = field.default is None
            if field.name.endswith("_fraction") or (optional and value is None):
                continue
            check_at_least(field.name, value, 1)
            if field.name.endswith(("values", "filler")) and value % 2:
                raise ValueError(f"{field.name} must be even, got {value}")
        if self.initial_tokens_per_pair is not None:
            check_at_least("initial_tokens_per_pair", self.initial_tokens_per_pair, self._width)
        check_curriculum_fraction(self.curriculum_fraction)

    def _check_part(self, part: Part) -> None:
        length, density, keys = part.names
        if part.tokens_per_pair < self._width:
            raise ValueError(
                f"{density} must be at least key_length + value_length = {self._width}, "
                f"got {part.tokens_per_pair}"
            )
        if part.num_pairs * self._width > part.length:
            raise ValueError(
                f"fixed_pairs must be at most the {part.length // self._width} pairs that fit "
                f"into {part.length} tokens, got {part.fixed_pairs}"
            )
        initial = self.initial_tokens_per_pair
        if initial is not None and part.num_pairs and initial > part.final_tokens_per_pair:
            of = density if part.fixed_pairs is None else f"{length} / fixed_pairs"
            raise ValueError(
                f"initial_tokens_per_pair must be at most {of} = "
                f"{part.final_tokens_per_pair:g}, got {initial}"
            )
        most_pairs = part.num_pairs_at(0.0, initial)
        most_keys = self._num_distinct_keys(most_pairs, 0.0)
        if self._num_possible_keys(part) < most_keys:
            raise ValueError(
                f"{keys} ** key_length must be at least {most_keys}, for "
                f"the {most_pairs} pairs of the densest context of {part.length} tokens, got "
                f"{self._num_possible_keys(part)}"
            )

    def _check_queries(self) -> None:
        first = self.parts()[0]
        if first.num_pairs < 1:
            raise ValueError(
                f"{first.names[0]} must be at least {first.names[1]} = {first.tokens_per_pair}, "
                f"got {first.length}"
            )
        if self.num_queries > first.num_pairs:
            raise ValueError(
                f"num_queries must be at most the {first.num_pairs} pairs of {first.length} "
                f"tokens, got {self.num_queries}"
            )

    def parts(self) -> tuple[Part, ...]:
        """The stretches of the context, in order; here the whole of it."""
        return (
            Part(
                length=self.context_length,
                tokens_per_pair=self.tokens_per_pair,
                fixed_pairs=self.fixed_pairs,
            ),
        )

    @property
    def vocabulary(self) -> Vocabulary:
        """Pad 0, query marker 1, then the alphabets of keys, values and filler in this order."""
        return Vocabulary(SPECIAL, {"k": self.num_keys, "v": self.num_values, "f": self.num_filler})

    @property
    def vocab_size(self) -> int:
        """Number of token ids, see :attr:`vocabulary`."""
        return self.vocabulary.size

    @property
    def sequence_length(self) -> int:
        """The context, the query marker, and the question and answer of every query."""
        return self._block_start + self._num_questions * self._block_width

    @property
    def num_pairs(self) -> int:
        """Pairs of a context once the curriculum is over."""
        return sum(part.num_pairs for part in self.parts())

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
        return sum(self._pairs_at(part, progress) for part in self.parts())

    def with_length(self: SomePairTask, context_length: int) -> SomePairTask:
        """The same task at another length, with as many questions, or one for each pair if fewer.

        Pairs grow with the length, unless they are fixed.
        """
        least = dataclasses.replace(self, context_length=context_length, num_queries=1)
        num_pairs = least.parts()[0].num_pairs
        return dataclasses.replace(least, num_queries=min(self.num_queries, num_pairs))

    def with_pairs_fixed(self: SomePairTask) -> SomePairTask:
        """The same task, whose ``with_length`` keeps the pairs and adds filler alone."""
        return dataclasses.replace(self, fixed_pairs=self.parts()[-1].num_pairs)

    def solve(self, input_ids: Int64[Tensor, " T"]) -> Int64[Tensor, " T"]:
        """Answer the queries by looking the keys up in the context: an oracle, right every time.

        Args:
            input_ids: one example ``[T]``; the values of its query block are not read.

        Returns:
            The answers where the labels have them, -100 elsewhere, ``[T]`` int64.
        """
        context, questions = self._context_of(input_ids), self._questions(input_ids)
        answers = torch.full_like(input_ids, IGNORED)
        block = answers[self._block_start :].view(-1, self._block_width)
        block[:, self._question_width :] = self._look_up(context, questions)
        return answers

    def _look_up(
        self, context: Int64[Tensor, " T"], questions: Int64[Tensor, "Q L"]
    ) -> Int64[Tensor, "Q V"]:
        """The values of the first pairs with the keys that the questions name."""
        places = self._key_places(context)
        found = (questions[:, None] == context[places]).all(dim=-1).int().argmax(dim=1)
        return self._values_after(context, places[found])

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of token names separated by white space, such as ``f12 k3 v5 ? k3``.

        Raises:
            ValueError: a name that is not in the :attr:`vocabulary`.
        """
        return self.vocabulary.encode(text)

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The token names of ids ``[T]``, separated by spaces."""
        return self.vocabulary.decode(ids)

    @property
    def _width(self) -> int:
        """Tokens of a pair."""
        return self.key_length + self.value_length

    @property
    def _question_width(self) -> int:
        """Tokens that ask a question."""
        return self.key_length

    @property
    def _block_width(self) -> int:
        """Tokens of a question and its answer."""
        return self._question_width + self.value_length

    @property
    def _block_start(self) -> int:
        """Where the questions begin, after the query marker."""
        return len(self._head) + self.context_length + 1

    @property
    def _num_questions(self) -> int:
        return self.num_queries

    def _num_possible_keys(self, part: Part) -> int:
        return self.vocabulary.alphabets[part.keys] ** self.key_length

    def _num_distinct_keys(self, num_pairs: int, progress: float) -> int:
        return num_pairs

    def _pairs_at(self, part: Part, progress: float) -> int:
        return part.num_pairs_at(self._share_at(progress), self.initial_tokens_per_pair)

    def _share_at(self, progress: float) -> float:
        """Of the curriculum that is over, in [0, 1]."""
        return share_of_curriculum(progress, self.curriculum_fraction)

    def _draw_unique_pairs(
        self, generator: torch.Generator, part: Part, progress: float
    ) -> tuple[Int64[Tensor, " T"], Int64[Tensor, "P L"]]:
        """A part's tokens, no two of its keys the same, and the positions of its pairs."""
        num_pairs = self._pairs_at(part, progress)
        context = self.vocabulary.draw(part.filler, (part.length,), generator)
        places = draw_places(generator, part.length, num_pairs, self._width)
        keys = self._draw_keys(generator, part, num_pairs)
        values = self.vocabulary.draw("v", (num_pairs, self.value_length), generator)
        context[places] = torch.cat([keys, values], dim=1)
        return context, places

    def _draw_keys(
        self, generator: torch.Generator, part: Part, num_pairs: int
    ) -> Int64[Tensor, "P L"]:
        """Token ids of distinct keys, drawn uniformly without replacement."""
        first, end = self.vocabulary.bounds(part.keys)
        return first + draw_numerals(generator, num_pairs, end - first, self.key_length)

    def _fit_to_split(self, context: Int64[Tensor, " T"], split: Split) -> None:
        """Change the last token, if need be, to give the sum of the ids the split's parity."""
        if int(context.sum()) % 2 == (split is Split.EVALUATE):
            return
        for letter in self.vocabulary.alphabets:
            if self.vocabulary.contains(letter, context[-1]):
                first, _ = self.vocabulary.bounds(letter)
                context[-1] = first + ((context[-1] - first) ^ 1)
                return

    def _ask(self, context: Int64[Tensor, " T"], block: Int64[Tensor, "Q L"]) -> dict[str, Tensor]:
        """The example that follows up a context with a block of questions and answers."""
        answers = block.clone()
        answers[:, : self._question_width] = IGNORED
        head = context.new_tensor(self._head)
        input_ids = torch.cat([head, context, torch.tensor([QUERY]), block.flatten()])
        labels = torch.full_like(input_ids, IGNORED)
        labels[self._block_start :] = answers.flatten()
        return {"input_ids": input_ids, "labels": labels}

    def _context_of(self, input_ids: Int64[Tensor, " T"]) -> Int64[Tensor, " C"]:
        return input_ids[len(self._head) : self._block_start - 1]

    def _questions(self, input_ids: Int64[Tensor, " T"]) -> Int64[Tensor, "Q L"]:
        block = input_ids[self._block_start :].view(-1, self._block_width)
        return block[:, : self._question_width]

    def _key_places(self, context: Int64[Tensor, " T"]) -> Int64[Tensor, "P L"]:
        """The positions of the key tokens of every pair of a context."""
        is_key = torch.zeros_like(context, dtype=torch.bool)
        for part in self.parts():
            is_key |= self.vocabulary.contains(part.keys, context)
        return is_key.nonzero().flatten().view(-1, self.key_length)

    def _values_after(
        self, context: Int64[Tensor, " T"], places: Int64[Tensor, "Q L"]
    ) -> Int64[Tensor, "Q V"]:
        """The values of the pairs whose key tokens stand at the places."""
        return context[places[:, -1:] + 1 + torch.arange(self.value_length)]

    def _spread(
        self, example: Mapping[str, Tensor], kind: Int64[Tensor, " Q"]
    ) -> Int64[Tensor, " T"]:
        """The kind of each question at the places of its answer, -1 elsewhere."""
        kinds = torch.full_like(example["labels"], -1)
        kinds[self._block_start :] = kind.repeat_interleave(self._block_width)
        return kinds.where(self.asked(example), torch.tensor(-1))


def in_each_kind(
    names: Mapping[int, str], kinds: Int64[Tensor, " T"]
) -> dict[str, Bool[Tensor, " T"]]:
    """For each kind that there is, by its name, the places that are of it."""
    return {name: kinds == kind for kind, name in names.items() if bool((kinds == kind).any())}
