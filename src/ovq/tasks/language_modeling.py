"""Language modelling on long plain texts: predict every token of a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from ovq.tasks.base import Split, TokenTask, check_at_least, check_progress, check_split
from ovq.tasks.corpus import fingerprint, held_out_split, read_corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer
else:
    # An optional package, imported on first use: the other tasks run without it.
    Tokenizer = Any

TokenizerName = Literal["bytes", "bpe"]
NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class LanguageModelingTask(TokenTask):
    """Windows of a corpus, every token labelled. A reconstruction: the paper's texts are PG-19.

    One example, with ``context_length=12`` and bytes (shown as letters):

        input_ids  n   t h e   b e g i n n
        labels     n   t h e   b e g i n n

    The last tenth of every text is for evaluation only, and a BPE is trained without it. The parts
    are joined, two line ends between texts, and a window starts anywhere in them with equal
    probability, in training and in evaluation alike: a seeded :class:`TaskDataset` is therefore a
    fixed evaluation set. The corpus is read and encoded on first use, once a process.

    Attributes:
        context_length: tokens of a window.
        source: ``kjv`` or a folder of ``.txt`` files, see :func:`ovq.tasks.corpus.read_corpus`.
        tokenizer: ``bytes`` (256 ids) or ``bpe``.
        bpe_vocab_size: tokens of the BPE, at least 256; unused with bytes.

    Raises:
        ValueError: a field out of its range. A bad source raises at :meth:`prepare`.

    >>> task = LanguageModelingTask(context_length=12)
    >>> task.decode(task.encode("in the beginning"))
    'in the beginning'
    """

    context_length: int = 256
    source: str = "kjv"
    tokenizer: TokenizerName = "bytes"
    bpe_vocab_size: int = 1024

    def __post_init__(self):
        check_at_least("context_length", self.context_length, 1)
        check_at_least("bpe_vocab_size", self.bpe_vocab_size, NUM_BYTES)
        if self.tokenizer not in get_args(TokenizerName):
            raise ValueError(
                f"tokenizer must be one of {get_args(TokenizerName)}, got {self.tokenizer!r}"
            )
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"source must name 'kjv' or a folder, got {self.source!r}")

    @property
    def vocab_size(self) -> int:
        """256 bytes, or the tokens of the BPE."""
        return NUM_BYTES if self.tokenizer == "bytes" else self.bpe_vocab_size

    @property
    def chance(self) -> float:
        """Share of tokens right by a uniform guess, ``1 / vocab_size``."""
        return 1.0 / self.vocab_size

    def load_tokenizer(self) -> Tokenizer:
        """The ``tokenizers.Tokenizer``, ready for ``save`` or for ``PreTrainedTokenizerFast``.

        Raises:
            ValueError, ImportError: as :meth:`prepare`, if it is a BPE.
        """
        if self.tokenizer == "bytes":
            return _load_tokenizer("", None)
        return _load_tokenizer(self.source, self.bpe_vocab_size)

    def load_tokens(self, split: Split) -> Int64[Tensor, " num_tokens"]:
        """The ids of a split's whole part of the corpus, ``[num_tokens]`` int64.

        Raises:
            ValueError: as :meth:`prepare`, or a ``split`` that is no :class:`Split`.
            ImportError: as :meth:`prepare`.
        """
        return self._tokens(split).long()

    def _tokens(self, split: Split) -> Tensor:
        check_split(split)
        merges = None if self.tokenizer == "bytes" else self.bpe_vocab_size
        tokens = _load_tokens(self.source, merges)[split]
        if len(tokens) < self.context_length:
            raise ValueError(
                f"context_length must be at most the {len(tokens)} tokens that source "
                f"{self.source!r} has to {split.value}, got {self.context_length}"
            )
        return tokens

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """``bytes`` and ``sha256`` of each file of the source, by name.

        Raises:
            ValueError, ImportError: a source that cannot be read.
        """
        return fingerprint(self.source)

    def prepare(self) -> None:
        """Read and encode the corpus.

        Raises:
            ValueError: a source that cannot be read, see :func:`ovq.tasks.corpus.read_corpus`; a
                split that is shorter than a window; a corpus too small for the BPE.
            ImportError: a package of the extra ``train`` is missing.
        """
        for split in Split:
            self._tokens(split)

    def example(
        self, generator: torch.Generator, *, split: Split, progress: float = 1.0
    ) -> dict[str, Tensor]:
        """Draw one window; see :meth:`ovq.tasks.base.Task.example`. Progress changes nothing."""
        check_progress(progress)
        tokens = self._tokens(split)
        num_windows = len(tokens) - self.context_length + 1
        start = int(torch.randint(num_windows, (), generator=generator))
        window = tokens[start : start + self.context_length].long()
        return {"input_ids": window, "labels": window.clone()}

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of a text; the vocabulary holds every byte, so it lacks nothing.

        Raises:
            ValueError: a character that has no UTF-8 form (a lone surrogate).
        """
        from ovq.tasks.tokenization import encode_text

        return encode_text(self.load_tokenizer(), text)

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The text of ids ``[T]``; bytes that are no UTF-8 show as U+FFFD."""
        from ovq.tasks.tokenization import decode_ids

        return decode_ids(self.load_tokenizer(), ids)


@lru_cache(maxsize=4)
def _load_parts(source: str) -> dict[Split, list[str]]:
    """The part of every text that belongs to each split."""
    parts = [held_out_split(text) for _, text in read_corpus(source)]
    return {
        Split.TRAIN: [train for train, _ in parts if train],
        Split.EVALUATE: [held_out for _, held_out in parts if held_out],
    }


@lru_cache(maxsize=4)
def _load_tokenizer(source: str, bpe_vocab_size: int | None) -> Tokenizer:
    """A BPE of the source's training part, or the bytes for ``None``."""
    from ovq.tasks.tokenization import byte_tokenizer, train_bpe

    if bpe_vocab_size is None:
        return byte_tokenizer()
    return train_bpe(_load_parts(source)[Split.TRAIN], bpe_vocab_size)


@lru_cache(maxsize=4)
def _load_tokens(source: str, bpe_vocab_size: int | None) -> dict[Split, Tensor]:
    """The ids of each split, ``[num_tokens]`` int32 to halve the memory that stays in use."""
    from ovq.tasks.tokenization import encode_text

    tokenizer = _load_tokenizer("" if bpe_vocab_size is None else source, bpe_vocab_size)
    return {
        split: encode_text(tokenizer, "\n\n".join(texts)).int()
        for split, texts in _load_parts(source).items()
    }
