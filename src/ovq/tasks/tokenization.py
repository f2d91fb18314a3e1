"""Tokenizers of plain text: single bytes, or byte pairs merged by how often they occur.

Both are ``tokenizers.Tokenizer`` objects on the alphabet of the 256 bytes, so any text has an
encoding, and ``transformers.PreTrainedTokenizerFast(tokenizer_object=...)`` takes either. This
module needs the extra ``train``; the rest of :mod:`ovq.tasks` does not.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from ovq.tasks.base import check_at_least, check_ids

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError as error:
    raise ImportError(
        "text tokenizers need the package tokenizers: pip install 'ovq[train]'"
    ) from error

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
# Long texts are encoded in blocks of this many characters, to keep the memory of one call small.
_BLOCK_LENGTH = 2**16


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose ids are the bytes of the text's UTF-8 form, 256 in all.

    >>> byte_tokenizer().encode("hé").ids
    [104, 195, 169]
    """
    return _byte_level(use_regex=False)


def _byte_level(*, use_regex: bool) -> Tokenizer:
    vocabulary = {letter: byte for byte, letter in enumerate(_letters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letters_of_bytes() -> list[str]:
    """The printable letter by which byte-level vocabularies write each byte, in order of bytes.

    Source: GPT-2. Printable Latin-1 bytes are themselves, the others count up from U+0100.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    shifted = {byte: NUM_BYTES + rank for rank, byte in enumerate(others)}
    return [chr(shifted.get(byte, byte)) for byte in range(NUM_BYTES)]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, deterministically.

    Args:
        texts: what to count pairs in; of a corpus, its training part only.
        vocab_size: tokens in all, the 256 bytes among them.

    Returns:
        A tokenizer with exactly ``vocab_size`` tokens.

    Raises:
        ValueError: ``vocab_size`` below 256, or more than the texts yield.
    """
    check_at_least("vocab_size", vocab_size, NUM_BYTES)
    tokenizer = _byte_level(use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"vocab_size must be at most the {tokenizer.get_vocab_size()} tokens that the texts "
            f"yield, got {vocab_size}"
        )
    return tokenizer


def with_end_of_text(tokenizer: Tokenizer) -> Tokenizer:
    """A copy in which the byte 0xFF, which no UTF-8 text holds, is the mark :data:`END_OF_TEXT`.

    Evaluation tools ask for a token to begin with and one to pad with. This one has an id that the
    model knows, and every text keeps its encoding, unless it spells out the mark.

    Args:
        tokenizer: of this module, by :func:`byte_tokenizer` or :func:`train_bpe`.

    >>> with_end_of_text(byte_tokenizer()).encode("\u00ff" + END_OF_TEXT).ids
    [195, 191, 255]
    """
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary[END_OF_TEXT] = vocabulary.pop(_letters_of_bytes()[0xFF])
    marked = Tokenizer.from_str(json.dumps(content))
    marked.add_special_tokens([END_OF_TEXT])
    return marked


def encode_text(tokenizer: Tokenizer, text: str) -> Int64[Tensor, " T"]:
    """The ids ``[T]`` int64 of a text, exactly: :func:`decode_ids` gives the text back.

    Raises:
        ValueError: a character that has no UTF-8 form (a lone surrogate).
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must have a UTF-8 form, got {text[error.start]!r} at character {error.start}"
        ) from None
    ids = [torch.tensor(tokenizer.encode(block).ids) for block in _blocks(text)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *ids])


def _blocks(text: str) -> Iterator[str]:
    """The text in pieces, cut between a letter and a space, where no token crosses anyway."""
    start = 0
    gap = re.compile(r"(?<=\w)(?= \w)")
    while start < len(text):
        cut = gap.search(text, start + _BLOCK_LENGTH)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def decode_ids(tokenizer: Tokenizer, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
    """The text of ids ``[T]``; bytes that are no UTF-8 show as U+FFFD.

    Raises:
        ValueError: an id that the tokenizer lacks.
    """
    numbers = check_ids(ids, tokenizer.get_vocab_size())
    return tokenizer.decode(numbers, skip_special_tokens=False)
