"""Regression: error of each function against the number of its earlier examples."""

from collections.abc import Iterator, Mapping
from typing import Any

from ovq.report.axes import GREY, Axis, Style, log_axis
from ovq.report.charts import Chart, Record, line_chart
from ovq.report.records import Suite
from ovq.report.scores import Score, Values, in_order, scores_of
from ovq.report.sections.base import (
    GAINED,
    HOVER,
    Placed,
    Section,
    averaged,
    averaging_table,
    make_section,
    records_of,
    styles_of,
    wide_table,
)
from ovq.report.tables import Cell, Table

ALL = "all"
# What is smaller or larger is drawn here. Least squares is exact without noise; with noise its
# error has no mean where there are about as many examples as features.
LEAST, MOST = 1e-4, 10.0
ORACLES = {
    "least_squares": "least squares per function",
    "pooled_least_squares": "pooled least squares",
    "nearest_neighbour": "nearest neighbour",
}


def regression(suite: Suite) -> Section:
    """Squared errors by number of functions, beside those of three solvers."""
    notes = (
        "Squared error of a prediction by the number of earlier examples of its function; targets "
        "have variance 1. The solvers predict on the same sequences. Least squares is exact where "
        "there is no noise, and boundless where there is and examples are about as many as "
        f"features: errors below {LEAST:g} or above {MOST:g} are drawn there.",
    )
    return make_section(suite, "In-context regression", notes, _charts(suite), _tables(suite))


def by_functions(suite: Suite) -> dict[int, list[Score]]:
    """Scores by number of functions."""
    scores = scores_of(suite)
    numbers = sorted(in_order(score.changes.get("num_functions", 0) for score in scores))
    return {
        number: [s for s in scores if s.changes.get("num_functions", 0) == number]
        for number in numbers
    }


def error(score: Score, group: str) -> Values:
    """Squared error over one kind of question, or over all."""
    if group == ALL:
        return score.values(lambda result: result["loss"])
    return score.group(group, "loss")


def groups_of(scores: list[Score]) -> list[str]:
    """Kinds of question, by their number of earlier examples."""
    names = {name for score in scores for name in (score.any_of("groups") or {})}
    return sorted(names, key=lambda name: int(name.split()[0].split("-")[0]))


def oracle_errors(scores: list[Score], group: str) -> Mapping[str, float]:
    """Errors of the solvers on the sequences that the models were measured on."""
    measured = next((score for score in scores if score.results), None)
    if measured is None:
        return {}
    if group == ALL:
        return measured.any_of("oracles") or {}
    return (measured.any_of("groups") or {}).get(group, {}).get("oracles", {})


def _drawn(record: Record) -> Record:
    limits = {name: min(MOST, max(LEAST, record[name])) for name in ("mean", "low", "high")}
    return record | limits | {"x": record["x"].removesuffix(" earlier")}


def _oracle_records(scores: list[Score], groups: list[str]) -> Iterator[Record]:
    for at, group in enumerate(groups):
        for name, value in oracle_errors(scores, group).items():
            same: dict[str, Any] = dict.fromkeys(("mean", "low", "high"), value)
            told = {"value": f"{value:.3f}", "seeds": "", "state": "", "learning rate": ""}
            about = {"model": ORACLES.get(name, name), "slots": "solver", "x": group, "at": at}
            yield _drawn(about | same | told)


def _charts(suite: Suite) -> Iterator[Chart]:
    shapes = ("triangle-down", "triangle-left", "triangle-right")
    oracles = {t: Style(GREY, shape) for t, shape in zip(ORACLES.values(), shapes, strict=True)}
    for number, scores in by_functions(suite).items():
        groups = groups_of(scores)
        shown = averaged(scores)
        places: list[Placed] = [(score, group) for score in shown for group in groups]
        records = [_drawn(record) for record in records_of(places, error, groups)]
        records += _oracle_records(scores, groups)
        drawn = [record[end] for record in records for end in ("low", "high")]
        names = [group.removesuffix(" earlier") for group in groups]
        yield line_chart(
            f"regression-{number}",
            f"Squared error, {number} function{'s' * (number != 1)}",
            records,
            x=Axis(title="earlier examples of the function", kind="ordinal", values=names),
            y=log_axis("squared error", drawn),
            styles=styles_of(scores_of(suite)) | oracles, hover=HOVER,
        )  # fmt: skip


def _tables(suite: Suite) -> Iterator[Table]:
    for number, scores in by_functions(suite).items():
        columns = {ALL: ALL} | {group: group for group in groups_of(scores)}
        places = [(score, column) for score in scores for column in columns]
        found = wide_table(
            f"Squared error by earlier examples, {number} function{'s' * (number != 1)}",
            places, columns, error,
        )  # fmt: skip
        rows = tuple(_oracle_row(scores, name, columns) for name in oracle_errors(scores, ALL))
        yield Table(head=found.head, rows=found.rows + rows, caption=found.caption)

    places = [(s, number) for number, scores in by_functions(suite).items() for s in scores]
    numbers = {number: str(number) for _, number in places}
    yield from averaging_table(
        f"{GAINED} squared error, less is better, by number of functions",
        places, numbers, lambda score, _: error(score, ALL),
    )  # fmt: skip


def _oracle_row(scores: list[Score], name: str, columns: Mapping[str, str]) -> tuple[Cell, ...]:
    errors = (oracle_errors(scores, column).get(name) for column in columns)
    cells = (Cell("") if value is None else Cell(f"{value:.3f}", value) for value in errors)
    return (Cell(ORACLES.get(name, name)), Cell("solver"), Cell(""), *cells)
