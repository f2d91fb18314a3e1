"""What suites on key-value pairs measure: length and density, few sequences with many questions."""

from collections.abc import Iterable, Iterator

from ovq.experiments.scales import Scale
from ovq.points import KEPT, Point

MOST_QUESTIONS = 256
# Slots at test time: shares of full attention's bytes that the claims are about, half a slot a
# token, and a whole one, which is exact attention. The last two are dear at great lengths, and are
# left out there.
SHARES = ("10%", "25%")
HALF, WHOLE = "T/2", "T/1"
SETTINGS = (*SHARES, HALF)
# The same bytes in longer chunks. Pairs come in clumps, and slots so many a chunk: the longer it
# is, the less a clump matters.
CHUNKED = tuple(f"{share}:T/128" for share in SHARES)
LONGEST_DEAR = 8192


def kept(settings: Iterable[str]) -> tuple[str, ...]:
    """The same slots without running means, as a control: a cache of what opened the slots."""
    return tuple(f"{setting}:{KEPT}" for setting in settings)


def longer(start: int, scale: Scale, longest: int | None = None) -> list[int]:
    """The trained length and its multiples by powers of 4, and the longest of the scale.

    >>> from ovq.experiments.scales import DEMO
    >>> longer(128, DEMO)
    [128, 512, 2048, 8192, 32768, 65536]
    """
    end = min(scale.longest, longest or scale.longest)
    lengths = []
    while start <= end:
        lengths.append(start)
        start *= 4
    return [*lengths, end] if end == scale.longest and end not in lengths else lengths


def density_points(
    scale: Scale,
    lengths: Iterable[int],
    tokens_per_pair: int,
    settings: Iterable[str | None] = SETTINGS,
) -> Iterator[Point]:
    """Recall at a density: as many questions as there are pairs, 256 at most, per sequence."""
    chosen, measured = tuple(settings), list(lengths)
    longest = max(LONGEST_DEAR, min(measured, default=0))
    for length in measured:
        questions = min(MOST_QUESTIONS, length // tokens_per_pair)
        for setting in chosen if questions else ():
            if setting in (HALF, WHOLE) and length > longest:
                continue
            yield Point(
                length=length,
                setting=setting,
                num_sequences=max(2, -(-scale.num_answers // questions)),
                changes={"tokens_per_pair": tokens_per_pair, "num_queries": questions},
            )
