"""Read a text once, in bounded memory, and keep what the model remembers of it as a file."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ovq.models import OVQCache, OVQForCausalLM
from ovq.models.state_file import Fingerprint, load_states, save_states
from ovq.ops.state_file import is_state_file
from ovq.runs import digest

PIECE = 4096  # tokens a call, counted from the start of a reading: other cuts round otherwise
SAVE_EVERY = 30.0  # seconds
SAVE_SHARE = 0.05  # of the time, at most, where states are large

# Called after every piece with the tokens read and those of the text.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text that was read, or part of one.

    Attributes:
        name: of its file.
        sha256: of the text.
        num_tokens: tokens that were to be read.
        num_read: tokens that were read so far.
    """

    name: str
    sha256: str
    num_tokens: int
    num_read: int = 0

    def __str__(self) -> str:
        of = "" if self.num_read == self.num_tokens else f" of {self.num_tokens:,}"
        return f"{self.num_read:,}{of} tokens of {self.name}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a model remembers after some texts, and what it expects next.

    Attributes:
        cache: the states of all layers.
        next_logits: of the token after the last one, ``[B, vocab_size]``; ``None`` if not known.
        sources: the texts in order.
    """

    cache: OVQCache = field(default_factory=OVQCache)
    next_logits: Float[Tensor, "B N"] | None = None
    sources: tuple[Source, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the first row has read."""
        return int(self.cache.states[0].num_tokens[0]) if self.cache.states else 0

    def save(self, path: str | PathLike, *, fingerprint: Fingerprint) -> None:
        """Write the memory as a state file, which :meth:`ovq.models.OVQCache.load` reads, too.

        Raises:
            ValueError, OSError: as :meth:`ovq.models.OVQCache.save`.
        """
        about = {
            "num_columns": self.cache.num_columns,
            "sources": [asdict(source) for source in self.sources],
        }
        logits = self.next_logits
        tensors = {} if logits is None else {"next_logits": logits}
        states = self.cache.states
        save_states(path, states, fingerprint=fingerprint, about=about, tensors=tensors)

    @classmethod
    def load(cls, path: str | PathLike, *, model: OVQForCausalLM) -> "Reading":
        """Read what :meth:`save` or :meth:`ovq.models.OVQCache.save` wrote.

        In place of the sources of the latter stands the file itself.

        Raises:
            ValueError, OSError: as :meth:`ovq.models.OVQCache.load`.
        """
        file = load_states(path, model=model)
        cache = OVQCache(file.states, file.about.get("num_columns", 0))
        reading = cls(cache=cache, next_logits=file.tensors.get("next_logits"))
        try:
            sources = tuple(Source(**source) for source in file.about.get("sources", []))
        except TypeError as error:
            raise ValueError(f"path must hold whole sources, got {path}: {error}") from None
        if not sources:
            read = reading.num_tokens
            name, sha256 = Path(path).name, digest(Path(path))
            sources = (Source(name=name, sha256=sha256, num_tokens=read, num_read=read),)
        return replace(reading, sources=sources)


class ReadingInterruptedError(KeyboardInterrupt):
    """A reading that was interrupted, and kept.

    Attributes:
        source: how far it came.
    """

    def __init__(self, source: Source):
        super().__init__(f"interrupted at token {source.num_read:,} of {source.num_tokens:,}")
        self.source = source


def begin_reading(
    model: OVQForCausalLM, state: Path | None, *, name: str, text: str, num_tokens: int
) -> Reading:
    """What is known before the first token of a text.

    Args:
        model: the reader.
        state: a state file of what was read before; ``None`` for nothing.
        name: of the text.
        text: all of it.
        num_tokens: those that are to be read of it.

    Raises:
        ValueError, OSError: as :meth:`Reading.load`.
    """
    before = Reading() if state is None else Reading.load(state, model=model)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    source = Source(name=name, sha256=sha256, num_tokens=num_tokens)
    return replace(before, sources=(*before.sources, source))


def read(
    model: OVQForCausalLM, ids: Int64[Tensor, " T"], reading: Reading, piece: int = PIECE
) -> Iterator[Reading]:
    """Read the rest of the last source, piece by piece.

    Only what the model remembers is held between pieces: constant memory, unless its mixers keep
    every token.

    Args:
        model: in evaluation mode.
        ids: all tokens of the last source, ``[T]``, those read already among them.
        reading: what was read so far.
        piece: tokens of one call of the model.

    Yields:
        A reading after every piece. Each is a value of its own, which later ones do not change.
    """
    source = reading.sources[-1]
    while source.num_read < len(ids):
        new = ids[source.num_read : source.num_read + piece]
        with torch.no_grad():
            logits, cache = model(
                new[None].to(model.device), cache=reading.cache, use_cache=True, logits_to_keep=1,
                return_dict=False,
            )[:2]  # fmt: skip
        source = replace(source, num_read=source.num_read + len(new))
        sources = (*reading.sources[:-1], source)
        reading = Reading(cache=cache, next_logits=logits[:, -1], sources=sources)
        yield reading


def unfinished_file(output: Path) -> Path:
    """Where a reading that is not done is kept."""
    return output.with_name(f"{output.name}.unfinished")


def read_to_file(
    model: OVQForCausalLM,
    ids: Int64[Tensor, " T"],
    output: Path,
    *,
    begin: Reading,
    progress: Progress | None = None,
    piece: int = PIECE,
) -> tuple[Reading, int]:
    """Read a text into a state file, or go on where an interrupted call stopped.

    What is read so far is kept beside the file from time to time and on Ctrl-C, and goes on to the
    same file, to the bit, as without an interruption. A file that a call like this wrote is left.

    Args:
        model: in evaluation mode.
        ids: the tokens to read, ``[T]``.
        output: of the state file; it is written once all is read.
        begin: what was read before, with the text itself as its last source.
        progress: called after every piece.
        piece: tokens of one call of the model.

    Returns:
        The reading that the file holds, and how many tokens of it this call has read.

    Raises:
        ValueError: no tokens, or a reading of something else was interrupted here.
        ReadingInterruptedError: Ctrl-C; the same call goes on.
    """
    if not len(ids):
        raise ValueError("text must hold at least one token, got none")
    unfinished = unfinished_file(output)
    found = _written_before(output, begin, model)
    if found is not None:
        unfinished.unlink(missing_ok=True)
        return found, 0
    fingerprint = Fingerprint.of(model)
    reading = _resumed(unfinished, begin, model)
    num_known = reading.sources[-1].num_read
    saved, pause = time.perf_counter(), SAVE_EVERY
    try:
        for reading in read(model, ids, reading, piece):  # noqa: B020 - the latest there is
            if progress is not None:
                progress(reading.sources[-1].num_read, len(ids))
            now = time.perf_counter()
            if now - saved > pause:
                reading.save(unfinished, fingerprint=fingerprint)
                saved = time.perf_counter()
                pause = max(SAVE_EVERY, (saved - now) / SAVE_SHARE)
        reading.save(output, fingerprint=fingerprint)
    except KeyboardInterrupt:
        if reading.sources[-1].num_read:
            reading.save(unfinished, fingerprint=fingerprint)
        raise ReadingInterruptedError(reading.sources[-1]) from None
    unfinished.unlink(missing_ok=True)
    return reading, len(ids) - num_known


def _resumed(unfinished: Path, begin: Reading, model: OVQForCausalLM) -> Reading:
    if not unfinished.exists():
        return begin
    after = f"delete {unfinished}, and the same command reads from the start"
    try:
        found = Reading.load(unfinished, model=model)
    except ValueError as error:
        raise ValueError(
            f"--output must have no other reading beside it: {error}; {after}"
        ) from None
    if _begun(found.sources) != _begun(begin.sources):
        names = ", ".join(source.name for source in found.sources)
        raise ValueError(
            f"--output must have no other reading beside it, got one of {names} that began "
            f"otherwise: {after}"
        )
    return found


def _begun(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources as they were before the last was read."""
    return (*sources[:-1], replace(sources[-1], num_read=0))


def _written_before(output: Path, begin: Reading, model: OVQForCausalLM) -> Reading | None:
    """What a state file holds, if it is just what a reading that begins like this would write."""
    if not output.exists():
        return None
    try:
        found = Reading.load(output, model=model)
    except ValueError:  # of another model, say
        return None
    last = begin.sources[-1]
    wanted = (*begin.sources[:-1], replace(last, num_read=last.num_tokens))
    return found if found.sources == wanted else None


def check_output(output: Path, state: Path | None) -> None:
    """Raise a ``ValueError`` if writing a state there would cost what is no state, or the input."""
    if state is not None and state.resolve() == output.resolve():
        raise ValueError(f"--output must be another file than --state, got {output}")
    if output.exists() and not is_state_file(output):
        raise ValueError(f"--output must be a new file or a state file, got {output}")
