"""Basic in-context recall: key-value pairs scattered in filler, then questions about the pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ovq.tasks.base import Split, check_split
from ovq.tasks.pairs import PairTask


@dataclass(frozen=True, kw_only=True)
class RecallTask(PairTask):
    """In-context recall with unique keys. A reconstruction: the paper's own data is not published.

    One example, with ``context_length=12, tokens_per_pair=4, num_queries=2`` (k keys, v values,
    f filler; a dot is the label -100):

        input_ids  f4 k3 v5 f1 f2 f4 k9 v0 k7 v5 f0 f6  ?  k9 v0 k3 v5
        labels      .  .  .  .  .  .  .  .  .  .  .  .  .   . v0  . v5

    No two keys of a sequence are the same; values are independent and uniform; the queries ask for
    pairs drawn without replacement. Fields, placement and splits are those of
    :class:`~ovq.tasks.pairs.PairTask`.

    Raises:
        ValueError: a field out of its range; too few keys for the pairs at the densest.

    >>> task = RecallTask(context_length=12, tokens_per_pair=4, num_queries=2)
    >>> example = task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)
    >>> example["input_ids"].shape, int((example["labels"] != -100).sum())
    (torch.Size([17]), 2)
    """

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one example, as drawn above; see :meth:`ovq.tasks.base.Task.example`."""
        check_split(split)
        (part,) = self.parts()
        context, places = self._draw_unique_pairs(generator, part, progress)
        self._fit_to_split(context, split)
        asked = torch.randperm(len(places), generator=generator)[: self.num_queries]
        return self._ask(context, context[places[asked]])
