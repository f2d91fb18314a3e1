"""Forgetting: the score on what came first against the tokens since."""

from collections.abc import Iterator

from ovq.report.axes import ACCURACY, Axis
from ovq.report.charts import Chart, line_chart
from ovq.report.records import Suite
from ovq.report.scores import scores_of
from ovq.report.sections.base import (
    GUESSING,
    HOVER,
    Pick,
    Placed,
    Section,
    by_length,
    length_columns,
    make_section,
    records_of,
    state_table,
    styles_of,
    trained_task,
    wide_table,
)
from ovq.report.tables import Table

PARTS = {"A": "what came first", "B": "what came since"}


def forgetting(suite: Suite) -> Section:
    """Scores on A, and on B, against the length of B in lengths of A."""
    return make_section(suite, "Forgetting", _notes(suite), _charts(suite), _tables(suite))


def _notes(suite: Suite) -> list[str]:
    task = trained_task(suite)
    if not task:
        return []
    return [
        f"A has {task['first_length']:,} tokens; n is the number of tokens of B after it, in "
        f"lengths of A. Trained at n = {times(suite, task['context_length'])}. A state of constant "
        f"size that is full of A has little left for B: a score on one is read beside the other.",
        GUESSING.format(task["num_values"]),
    ]


def times(suite: Suite, length: int) -> str:
    """Tokens of B in a context, in lengths of A."""
    first = trained_task(suite).get("first_length", length)
    return f"{(length - first) / first:g}"


def _places(suite: Suite, part: str) -> list[Placed]:
    """All scores on a part; of B there is none without tokens of it."""
    places = [(score, times(suite, score.length)) for score in scores_of(suite)]
    return [(score, n) for score, n in places if part == "A" or n != "0"]


def _score_on(part: str) -> Pick:
    return lambda score, _: score.group(part)


def _charts(suite: Suite) -> Iterator[Chart]:
    trained = times(suite, trained_task(suite).get("context_length", 0))
    for part, what in PARTS.items():
        places = _places(suite, part)
        values = sorted({place for _, place in places}, key=float)
        yield line_chart(
            f"forgetting-{part.lower()}", f"Accuracy on {part}, {what}",
            records_of(places, _score_on(part), values),
            x=Axis(title="n, in lengths of A", kind="ordinal", values=values), y=ACCURACY,
            styles=styles_of(scores_of(suite)), hover=HOVER,
            trained=trained if trained in values else None,
        )  # fmt: skip


def _tables(suite: Suite) -> Iterator[Table]:
    for part, what in PARTS.items():
        places = _places(suite, part)
        columns = {n: f"n = {n}" for n in sorted({place for _, place in places}, key=float)}
        yield wide_table(f"Accuracy on {part}, {what}", places, columns, _score_on(part))
    scores = scores_of(suite)
    yield state_table("Bytes of state by length", by_length(scores), length_columns(scores))
