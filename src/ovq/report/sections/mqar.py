"""MQAR: accuracy at the published settings; and the section of any other suite."""

from collections.abc import Iterator

from ovq.report.axes import ACCURACY, Axis
from ovq.report.charts import Chart, line_chart
from ovq.report.records import Suite
from ovq.report.scores import Score, in_order, scores_of
from ovq.report.sections.base import (
    HOVER,
    Section,
    accuracy,
    make_section,
    records_of,
    state_table,
    styles_of,
    trained_task,
    wide_table,
)
from ovq.report.tables import Table


def mqar(suite: Suite) -> Section:
    """Multi-query associative recall by context and pairs."""
    task = trained_task(suite)
    notes = [f"Trained at {task['context_length']} tokens, {task['fixed_pairs']} pairs."] * bool(
        task
    )
    return make_section(
        suite, "MQAR", notes, _charts(suite, "context / pairs"), _tables(suite, "context / pairs")
    )


def other(suite: Suite) -> Section:
    """A suite that has no section of its own: accuracy, or loss, at every point."""
    what = "context, changes"
    return make_section(suite, suite.name, [], _charts(suite, what), _tables(suite, what))


def _place(score: Score) -> str:
    pairs = score.changes.get("fixed_pairs")
    if pairs is not None:
        return f"{score.length} / {pairs}"
    told = (f"{name} {value}" for name, value in score.changes.items())
    return ", ".join([f"{score.length:,}", *told])


def _charts(suite: Suite, what: str, trained: str = "") -> Iterator[Chart]:
    scores = scores_of(suite)
    values = in_order(_place(score) for score in scores)
    yield line_chart(
        f"{suite.name}-accuracy", "Accuracy by setting",
        records_of([(score, _place(score)) for score in scores], accuracy, values),
        x=Axis(title=what, kind="ordinal", values=values), y=ACCURACY,
        styles=styles_of(scores), hover=HOVER,
        trained=trained if trained in values else None,
    )  # fmt: skip


def _tables(suite: Suite, what: str) -> Iterator[Table]:
    scores = scores_of(suite)
    places = [(score, _place(score)) for score in scores]
    columns = {place: place for _, place in places}
    yield wide_table(f"Accuracy by {what}", places, columns, accuracy)
    yield state_table(f"Bytes of state by {what}", places, columns)
