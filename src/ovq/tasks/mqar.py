"""Multi-query associative recall as zoology sets it, to compare with published numbers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from ovq.tasks.alphabets import Vocabulary
from ovq.tasks.base import (
    IGNORED,
    Split,
    TokenTask,
    check_at_least,
    check_curriculum_fraction,
    check_split,
    share_of_curriculum,
)

# Context lengths and pairs of published runs, all with a vocabulary of 8,192. Source: folder
# zoology/experiments/ of the repository HazyResearch/zoology: paper_configs/iclr24_zoology_figure2,
# whose fillers are zeros ("Zoology: Measuring and Improving Recall in Efficient Language Models",
# arXiv 2312.04927), and mqar_example_configs/original_mqar_configs.py, the mixture of training data
# and the test sets of accuracy against state size ("Simple linear attention language models
# balance the recall-throughput tradeoff", arXiv 2402.18668).
PUBLISHED: dict[str, tuple[tuple[int, int], ...]] = {
    "zoology": ((64, 4), (128, 8), (256, 16), (512, 64)),
    "based-train": ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64)),
    "based-test": (
        (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MQARTask(TokenTask):
    """MQAR: pairs end to end, then every key once more, at gaps by a power law.

    A reconstruction of the generator of zoology (arXiv 2312.04927). One example, with
    ``context_length=16, tokens_per_pair=8`` (k keys, v values, x any token but the two keys; a dot
    is the label -100):

        input_ids  k1 v6 k3 v5  x  x k3  x  x  x  x  x k1  x  x  x
        labels      .  .  .  .  .  .  . v5  .  .  .  .  . v6  .  .

    A key is a number in ``[1, vocab_size / 2)``, a value one in ``[vocab_size / 2, vocab_size)``,
    neither comes twice. A question stands at an even distance ``2 g`` from the end of the pairs,
    with ``g + 1`` drawn without replacement in proportion to ``(g + 1) ** (power_a - 1)``. As
    published, a question is not followed by its answer but by filler: the label is what the model
    is asked to predict there, though the sequence goes on otherwise.

    Two flaws of the published generator are mended: the filler comes from the seeded generator, and
    it is none of the sequence's keys, after which a second answer would be right as well.

    The splits cannot share a sequence: the ids sum to an even number in training and to an odd one
    in evaluation; the last token, always filler, is drawn among those of fitting parity.

    Attributes:
        context_length: tokens in all, even.
        tokens_per_pair: tokens for each pair, ``context_length // tokens_per_pair`` pairs; at least
            4, two for the pair and two for its question.
        fixed_pairs: pairs whatever the length; 4 to 64 are published with 64 to 256 tokens, see
            :data:`PUBLISHED`.
        vocab_size: token ids, even.
        power_a: exponent of the law of gaps; 0.01 is published, 1 makes all gaps equally likely.
        initial_pairs: pairs at progress 0, from which they grow linearly; ``None`` for no
            curriculum. (Published runs mix settings in training instead.)
        curriculum_fraction: progress at which all pairs are there, in (0, 1].

    Raises:
        ValueError: a field out of its range; too few keys for the pairs.

    >>> tasks = [MQARTask(context_length=t, fixed_pairs=p) for t, p in PUBLISHED["zoology"]]
    >>> [task.num_pairs for task in tasks]
    [4, 8, 16, 64]
    """

    context_length: int = 64
    tokens_per_pair: int = 16
    fixed_pairs: int | None = None
    vocab_size: int = 8192  # pyright: ignore[reportIncompatibleMethodOverride]
    power_a: float = 0.01
    initial_pairs: int | None = None
    curriculum_fraction: float = 0.5

    def __post_init__(self):
        check_at_least("context_length", self.context_length, 1)
        check_at_least("tokens_per_pair", self.tokens_per_pair, 4)
        check_at_least("vocab_size", self.vocab_size, 4)
        for name in ("context_length", "vocab_size"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, got {getattr(self, name)}")
        for name in ("fixed_pairs", "initial_pairs"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if not isinstance(self.power_a, int | float) or not 0.0 < self.power_a < float("inf"):
            raise ValueError(f"power_a must be finite and above 0, got {self.power_a!r}")
        check_curriculum_fraction(self.curriculum_fraction)
        self._check_pairs()

    def _check_pairs(self) -> None:
        most = self.context_length // 4
        if self.fixed_pairs is not None and self.fixed_pairs > most:
            raise ValueError(
                f"fixed_pairs must be at most context_length // 4 = {most}, got {self.fixed_pairs}"
            )
        if self.num_pairs < 1:
            raise ValueError(
                f"context_length must be at least tokens_per_pair = {self.tokens_per_pair}, "
                f"got {self.context_length}"
            )
        if self.initial_pairs is not None and self.initial_pairs > self.num_pairs:
            raise ValueError(
                f"initial_pairs must be at most the {self.num_pairs} pairs of the context, got "
                f"{self.initial_pairs}"
            )
        if self.vocab_size // 2 - 1 < self.num_pairs:
            raise ValueError(
                f"vocab_size must be at least {2 * self.num_pairs + 2}, for {self.num_pairs} keys "
                f"and values, got {self.vocab_size}"
            )

    @property
    def num_pairs(self) -> int:
        """Pairs of a sequence once the curriculum is over."""
        if self.fixed_pairs is not None:
            return self.fixed_pairs
        return self.context_length // self.tokens_per_pair

    @property
    def vocabulary(self) -> Vocabulary:
        """0, the keys and the values; filler is written by the names of these."""
        half = self.vocab_size // 2
        return Vocabulary(("<pad>",), {"k": half - 1, "v": half})

    @property
    def chance(self) -> float:
        """Share of values right by a guess among all of them, ``2 / vocab_size``."""
        return 2.0 / self.vocab_size

    @property
    def context_chance(self) -> float:
        """Share right by answering with any one value of the pairs: no recall yet."""
        return 1.0 / self.num_pairs

    def num_pairs_at(self, progress: float) -> int:
        """Pairs of a sequence at a progress of training in [0, 1]."""
        share = share_of_curriculum(progress, self.curriculum_fraction)
        if self.initial_pairs is None:
            return self.num_pairs
        return self.initial_pairs + int(share * (self.num_pairs - self.initial_pairs))

    def with_pairs_fixed(self) -> "MQARTask":
        """The same task, whose ``with_length`` keeps the pairs and adds filler alone."""
        return dataclasses.replace(self, fixed_pairs=self.num_pairs)

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        num_pairs, half = self.num_pairs_at(progress), self.vocab_size // 2
        keys = 1 + torch.randperm(half - 1, generator=generator)[:num_pairs]
        values = half + torch.randperm(half, generator=generator)[:num_pairs]
        places = self._draw_questions(generator, num_pairs)
        is_filler = torch.ones(self.vocab_size, dtype=torch.bool)
        is_filler[keys] = False
        fillers = is_filler.nonzero().flatten()
        size = (self.context_length,)
        input_ids = fillers[torch.randint(len(fillers), size, generator=generator)]
        input_ids[0 : 2 * num_pairs : 2] = keys
        input_ids[1 : 2 * num_pairs : 2] = values
        input_ids[places] = keys
        wanted = (int(input_ids[:-1].sum()) + (split is Split.EVALUATE)) % 2
        fitting = fillers[fillers % 2 == wanted]
        input_ids[-1] = fitting[torch.randint(len(fitting), (), generator=generator)]
        labels = torch.full_like(input_ids, IGNORED)
        labels[places + 1] = values
        return {"input_ids": input_ids, "labels": labels}

    def _draw_questions(self, generator: torch.Generator, num_pairs: int) -> Int64[Tensor, " P"]:
        """The positions at which the keys are asked for, in the order of the keys."""
        space = self.context_length // 2 - num_pairs
        weights = torch.arange(1, space + 1, dtype=torch.float64) ** (self.power_a - 1.0)
        gaps = torch.multinomial(weights, num_pairs, generator=generator)
        return 2 * num_pairs + 2 * gaps

    def solve(self, input_ids: Int64[Tensor, " T"]) -> Int64[Tensor, " T"]:
        """Answer every question by looking its key up: an oracle, right every time.

        Args:
            input_ids: one example ``[T]`` without a curriculum.

        Returns:
            The answers where the labels have them, -100 elsewhere, ``[T]`` int64.
        """
        start = 2 * self.num_pairs
        value_of = torch.full((self.vocab_size,), IGNORED)
        value_of[input_ids[0:start:2]] = input_ids[1:start:2]
        answers = torch.full_like(input_ids, IGNORED)
        answers[start + 1 :] = value_of[input_ids[start:-1]]
        return answers

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of token names separated by white space, such as ``k3 v5 k3``.

        Raises:
            ValueError: a name that is not in the :attr:`vocabulary`.
        """
        return self.vocabulary.encode(text)

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The token names of ids ``[T]``, separated by spaces."""
        return self.vocabulary.decode(ids)
