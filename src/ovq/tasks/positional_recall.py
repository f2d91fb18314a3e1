"""Positional in-context recall: keys that come several times, asked for one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ovq.tasks.alphabets import Vocabulary
from ovq.tasks.base import Split, check_curriculum_fraction, check_progress, check_split
from ovq.tasks.draws import draw_distinct, draw_places
from ovq.tasks.pairs import SPECIAL, PairTask, Part, in_each_kind

START = len(SPECIAL)  # the id of <s>
# Of a curriculum that are looked at in advance.
_STEPS = 256


@dataclass(frozen=True, kw_only=True)
class PositionalRecallTask(PairTask):
    """Recall of the value that a key had the n-th time. A reconstruction: the paper gives no data.

    One example, with ``context_length=16, tokens_per_pair=4, num_queries=2`` (k keys, v values,
    f filler, o ordinals, of which o0 asks for the first time; a dot is the label -100):

        input_ids  <s> f4 k3 v5 f1 k9 v0 f2 k3 v8 f4 k9 v3 f6 f0 f0 f7  ?  o0 k9 v0 o1 k3 v8
        labels      .   .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .  .   .  . v0  .  . v8

    ``<s>``, before the context, is what softmax attention can weigh equal keys against: without
    it attention to one key that came twice, and to one that came once, reads the same.

    Every key comes ``min_occurrences`` to ``max_occurrences`` times, in random order, with another
    value each time; the numbers of times are uniform but for a few, changed to add up to the number
    of pairs. Values are uniform, and no two values of a key share a couple ``v0 v1``, ``v2 v3``,
    ... in their last token, so that they still differ when a split changes the last token of the
    context. The queries ask for pairs drawn without replacement, by ordinal and key.

    Placement, splits and the other fields are those of :class:`~ovq.tasks.pairs.PairTask`.

    Attributes:
        min_occurrences: times that a key comes, at least.
        max_occurrences: times that a key comes, at most.
        initial_occurrences: times that every key comes until ``curriculum_fraction``, when the
            density is what it will be; from there both bounds move to what they are in the end.
            With 1 it starts as basic recall. ``None`` for no such curriculum.
        occurrences_fraction: progress at which the bounds are that, above ``curriculum_fraction``
            if there is such a curriculum, at most 1.

    Raises:
        ValueError: a field out of its range; too few keys for the pairs at the densest, too few
            values for the times, or a number of pairs that these times do not add up to.

    >>> task = PositionalRecallTask(context_length=16, tokens_per_pair=4, num_queries=2)
    >>> example = task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)
    >>> example["input_ids"].shape, sorted(task.groups(example))
    (torch.Size([24]), ['o1', 'o2'])
    """

    min_occurrences: int = 2
    max_occurrences: int = 8
    initial_occurrences: int | None = None
    occurrences_fraction: float = 1.0

    _head: ClassVar[tuple[int, ...]] = (START,)

    def _check_part(self, part: Part) -> None:
        least, most = self.min_occurrences, self.max_occurrences
        if most < least:
            raise ValueError(
                f"max_occurrences must be at least min_occurrences = {least}, got {most}"
            )
        if self.num_values**self.value_length < 2 * most:
            raise ValueError(
                f"num_values ** value_length must be at least 2 * max_occurrences = {2 * most}, "
                f"got {self.num_values**self.value_length}"
            )
        if self.initial_occurrences is not None and self.initial_occurrences > least:
            raise ValueError(
                f"initial_occurrences must be at most min_occurrences = {least}, got "
                f"{self.initial_occurrences}"
            )
        begun, ended = self.curriculum_fraction, self.occurrences_fraction
        check_curriculum_fraction(ended, "occurrences_fraction")
        if self.initial_occurrences is not None and ended <= begun:
            raise ValueError(
                f"occurrences_fraction must be above curriculum_fraction = {begun}, got {ended}"
            )
        super()._check_part(part)
        densest = part.num_pairs_at(0.0, self.initial_tokens_per_pair)
        for least, most in sorted(
            {self.occurrences_at(step / _STEPS) for step in range(_STEPS + 1)}
        ):
            for num_pairs in range(max(1, part.num_pairs), densest + 1):
                if -(-num_pairs // most) > num_pairs // least:
                    raise ValueError(
                        f"min_occurrences and max_occurrences must be such that some number of "
                        f"keys has {num_pairs} pairs, got {least} and {most}"
                    )

    @property
    def vocabulary(self) -> Vocabulary:
        """Pad 0, query marker 1, start 2, then keys, values, filler and ordinals."""
        alphabets = super().vocabulary.alphabets
        return Vocabulary((*SPECIAL, "<s>"), {**alphabets, "o": self.max_occurrences})

    @property
    def context_chance(self) -> float:
        """Share right by answering with any one value of the key: recall without the order."""
        return self._num_distinct_keys(self.num_pairs) / self.num_pairs

    @property
    def _question_width(self) -> int:
        return self.key_length + 1

    def occurrences_at(self, progress: float) -> tuple[int, int]:
        """The least and the most times that a key comes at a progress of training in [0, 1]."""
        final = self.min_occurrences, self.max_occurrences
        if self.initial_occurrences is None:
            return final
        check_progress(progress)
        first, begun = self.initial_occurrences, self.curriculum_fraction
        share = (progress - begun) / (self.occurrences_fraction - begun)
        share = min(1.0, max(0.0, share))
        least, most = (first + share * (end - first) for end in final)
        return int(least), round(most)

    def _num_distinct_keys(self, num_pairs: int, progress: float = 1.0) -> int:
        """Keys of a context: as many as bring the mean number of times near the middle."""
        least, most = self.occurrences_at(progress)
        middle = round(2 * num_pairs / (least + most))
        return min(max(middle, -(-num_pairs // most)), num_pairs // least)

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        (part,) = self.parts()
        num_pairs = self._pairs_at(part, progress)
        context = self.vocabulary.draw(part.filler, (part.length,), generator)
        places = draw_places(generator, part.length, num_pairs, self._width)
        num_keys = self._num_distinct_keys(num_pairs, progress)
        owners = self._draw_owners(generator, num_pairs, num_keys, progress)
        times = _times_before(owners)
        keys = self._draw_keys(generator, part, num_keys)
        values = self._draw_values(generator, num_keys)
        context[places] = torch.cat([keys[owners], values[owners, times]], dim=1)
        self._fit_to_split(context, split)

        asked = torch.randperm(num_pairs, generator=generator)[: self.num_queries]
        pairs, first_ordinal = context[places[asked]], self.vocabulary.bounds("o")[0]
        key, value = pairs.split([self.key_length, self.value_length], dim=1)
        ordinals = first_ordinal + times[asked, None]
        return self._ask(context, torch.cat([ordinals, key, value], dim=1))

    def _draw_owners(
        self, generator: torch.Generator, num_pairs: int, num_keys: int, progress: float
    ) -> Int64[Tensor, " P"]:
        """Which of the keys each pair has, in random order."""
        least, most = self.occurrences_at(progress)
        counts = torch.randint(least, most + 1, (num_keys,), generator=generator)
        missing = num_pairs - int(counts.sum())
        # Room to grow, or to shrink, one unit after the other; as many as are missing change.
        room = most - counts if missing > 0 else counts - least
        units = torch.arange(num_keys).repeat_interleave(room)
        chosen = units[torch.randperm(len(units), generator=generator)[: abs(missing)]]
        changes = torch.bincount(chosen, minlength=num_keys)
        counts = counts + changes if missing > 0 else counts - changes
        owners = torch.arange(num_keys).repeat_interleave(counts)
        return owners[torch.randperm(num_pairs, generator=generator)]

    def _draw_values(
        self, generator: torch.Generator, num_keys: int
    ) -> Int64[Tensor, "keys times V"]:
        """For every key, a value for each time that it may come, no two of one couple."""
        num_couples = self.num_values**self.value_length // 2
        couples = draw_distinct(generator, num_keys, self.max_occurrences, num_couples)
        bits = torch.randint(2, couples.shape, generator=generator)
        codes = 2 * couples + bits
        # The last token is the lowest digit, whose lowest bit tells the two of a couple apart.
        powers = self.num_values ** torch.arange(self.value_length - 1, -1, -1)
        return self.vocabulary.bounds("v")[0] + codes[..., None] // powers % self.num_values

    def groups(self, example: Mapping[str, Tensor]) -> dict[str, Bool[Tensor, " T"]]:
        """The answers by ordinal, under the names of the ordinals' tokens."""
        questions = self._questions(example["input_ids"])
        ordinals = questions[:, 0] - self.vocabulary.bounds("o")[0]
        names = {time: f"o{time}" for time in range(self.max_occurrences)}
        return in_each_kind(names, self._spread(example, ordinals))

    def _look_up(
        self, context: Int64[Tensor, " T"], questions: Int64[Tensor, "Q L"]
    ) -> Int64[Tensor, "Q V"]:
        places = self._key_places(context)
        keys = context[places]
        known, owners = keys.unique(dim=0, return_inverse=True)
        asked = (questions[:, None, 1:] == known).all(dim=-1).int().argmax(dim=1)  # [Q]
        ordinals = questions[:, :1] - self.vocabulary.bounds("o")[0]
        is_it = (owners == asked[:, None]) & (_times_before(owners) == ordinals)  # [Q, P]
        return self._values_after(context, places[is_it.int().argmax(dim=1)])


def _times_before(owners: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
    """How many earlier pairs have the same owner."""
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    times = torch.empty_like(owners)
    times[order] = torch.arange(len(owners)) - starts
    return times
