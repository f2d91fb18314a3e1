"""Recall and positional recall: accuracy against length, by density, with the state it takes."""

from collections.abc import Iterator
from itertools import chain

from ovq.report.axes import ACCURACY, Axis, lengths_axis, log_axis
from ovq.report.charts import Chart, line_chart
from ovq.report.records import Suite
from ovq.report.scores import Score, Values, in_order, scores_of
from ovq.report.sections.base import (
    GAINED,
    GUESSING,
    HOVER,
    SLOTS,
    Placed,
    Section,
    accuracy,
    averaged,
    averaging_table,
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


def recall(suite: Suite) -> Section:
    """Recall of unique keys."""
    return make_section(suite, "Recall", _notes(suite), _charts(suite), _tables(suite))


def positional(suite: Suite) -> Section:
    """Recall of the n-th value of a key, also by n."""
    charts = chain(_charts(suite), _ordinal_charts(suite))
    tables = chain(_tables(suite), _ordinal_tables(suite))
    return make_section(suite, "Positional recall", _notes(suite), charts, tables)


def by_density(suite: Suite) -> dict[int, list[Score]]:
    """Scores by tokens a pair, the thinnest first."""
    scores = scores_of(suite)
    found = in_order(score.changes.get("tokens_per_pair") for score in scores)
    return {
        density: [score for score in scores if score.changes.get("tokens_per_pair") == density]
        for density in sorted(found, key=lambda density: -(density or 0))
    }


def _notes(suite: Suite) -> list[str]:
    task = trained_task(suite)
    if not task:
        return []
    notes = [
        f"Trained at {_trained_lengths(suite, task['context_length'])} with a pair every "
        f"{task['tokens_per_pair']}. {SLOTS} Dictionaries are told the length of the context: "
        f"their slots are set by it, and so is linear growth. States of constant size have a small "
        f"part of those bytes at great lengths, as the tables of state say.",
        GUESSING.format(task["num_values"]),
    ]
    if "max_occurrences" in task:
        few, many = task["min_occurrences"], task["max_occurrences"]
        notes.append(f"A key has {few} to {many} values: to find the key alone is to name any.")
    return notes


def _trained_lengths(suite: Suite, length: int) -> str:
    """The context, after a shorter one if training begins with it."""
    training = next((entry.config["training"] for entry in suite.entries if entry.config), {})
    short, share = training.get("short_length"), training.get("short_fraction", 0.0)
    if short is None or not share:
        return f"{length:,} tokens"
    return f"{short:,} tokens for {share:.0%} of the steps and then at {length:,}"


def _state(score: Score, place: int) -> Values:
    """The same for all seeds."""
    return score.values(lambda result: result["state_bytes"])


def _charts(suite: Suite) -> Iterator[Chart]:
    trained = trained_task(suite).get("context_length")
    styles = styles_of(scores_of(suite))
    for density, scores in by_density(suite).items():
        yield line_chart(
            f"{suite.name}-every-{density}",
            f"Accuracy, a pair every {density} tokens",
            records_of(by_length(averaged(scores)), accuracy),
            x=lengths_axis([score.length for score in scores]), y=ACCURACY,
            styles=styles, trained=trained, hover=HOVER,
        )  # fmt: skip
    scores = averaged(next(iter(by_density(suite).values())))
    held = records_of(by_length(scores), _state)
    yield line_chart(
        f"{suite.name}-state",
        "State of one sequence",
        held,
        x=lengths_axis([score.length for score in scores]),
        y=log_axis("bytes", [record["mean"] for record in held], "~s"),
        styles=styles, trained=trained, hover=("state",),
    )  # fmt: skip


def _tables(suite: Suite) -> Iterator[Table]:
    for density, scores in by_density(suite).items():
        columns, places = length_columns(scores), by_length(scores)
        every = f"a pair every {density} tokens"
        yield wide_table(f"Accuracy by context length, {every}", places, columns, accuracy)
        yield from averaging_table(f"{GAINED} accuracy, {every}", places, columns, accuracy)
        yield state_table(
            f"Bytes of state by context length, and share of full attention's, {every}",
            places, columns,
        )  # fmt: skip


def _at_length(suite: Suite) -> Iterator[tuple[str, str, list[Placed], dict[str, str]]]:
    """The densest questions, at the shortest and the longest measured length, by ordinal."""
    density, scores = list(by_density(suite).items())[-1]
    measured = sorted({score.length for score in scores if score.results})
    for length in in_order([*measured[:1], *measured[-1:]]):
        of_length = [score for score in scores if score.length == length]
        names = {name for score in of_length for name in (score.any_of("groups") or {})}
        ordinals = {
            name: str(int(name[1:]) + 1) for name in sorted(names, key=lambda n: int(n[1:]))
        }
        title = f"Accuracy by ordinal at {length:,} tokens, a pair every {density}"
        places = [(score, name) for score in of_length for name in ordinals]
        yield f"{suite.name}-ordinal-{length}", title, places, ordinals


def _ordinal_charts(suite: Suite) -> Iterator[Chart]:
    for name, title, places, ordinals in _at_length(suite):
        yield line_chart(
            name, title, records_of(places, Score.group, list(ordinals)),
            x=Axis(title="ordinal, o0 the first", kind="ordinal",
                   values=list(ordinals)),
            y=ACCURACY, styles=styles_of(scores_of(suite)), hover=HOVER,
        )  # fmt: skip


def _ordinal_tables(suite: Suite) -> Iterator[Table]:
    for _, title, places, ordinals in _at_length(suite):
        yield wide_table(title, places, ordinals, Score.group)
