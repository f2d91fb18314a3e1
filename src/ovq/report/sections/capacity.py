"""Capacity: accuracy against slots at test time, and against the size of a trained codebook."""

from collections.abc import Iterator

from ovq.report.axes import ACCURACY, lengths_axis, styles_in_order
from ovq.report.charts import Chart, Record, line_chart
from ovq.report.records import Suite
from ovq.report.scores import Score, in_order, scores_of
from ovq.report.sections.base import (
    GAINED,
    HOVER,
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
    wide_table,
)
from ovq.report.tables import Table


def capacity(suite: Suite) -> Section:
    """Slots of dictionaries that were trained with one number of them; codes of codebooks."""
    notes = (
        "Slots are those at test time: every point of a line is the same trained model. Codebooks "
        "are trained at each size; their values are running means as in OVQ attention, so that of "
        "the two dictionaries only the keys' is static. Compare slots and codes at equal bytes; "
        "the codes themselves are parameters, and not among them.",
    )
    return make_section(suite, "Capacity", notes, _charts(suite), _tables(suite))


def num_codes(suite: Suite) -> dict[str, int]:
    """By model, of those with a codebook."""
    models = {entry.name: entry.config.get("model", {}) for entry in suite.entries}
    return {
        name: model["num_codes"]
        for name, model in models.items()
        if model and model["layer_pattern"][-1].startswith("vq")
    }


def _at_length(record: Record, score: Score) -> Record:
    return record | {"length": f"{score.length:,}"}


def _lines_by_length(name: str, title: str, places: list[Placed], x: str) -> Chart:
    """Accuracy against a size, one line a length."""
    lengths = list(length_columns(score for score, _ in places).values())
    records = [
        _at_length(record, score)
        for score, size in places
        for record in records_of([(score, size)], accuracy)
    ]
    sizes = sorted({size for _, size in places})
    axis = lengths_axis(sizes, x)
    return line_chart(
        name, title, [record | {"slots": "", "setting": record["slots"]} for record in records],
        x=axis, y=ACCURACY, styles=styles_in_order(lengths), key="length",
        hover=("model", "setting", *HOVER),
    )  # fmt: skip


def _charts(suite: Suite) -> Iterator[Chart]:
    scores = averaged(scores_of(suite))
    for model in in_order(score.model for score in scores if score.setting):
        places = [
            (score, score.any_of("num_centroids"))
            for score in scores
            if score.model == model and score.results
        ]
        yield _lines_by_length(
            f"capacity-{model}", f"Accuracy of {model} against slots at test time", places, "slots"
        )
    codes = num_codes(suite)
    places = [(score, codes[score.model]) for score in scores if score.model in codes]
    if any(score.results for score, _ in places):
        yield _lines_by_length(
            "capacity-codebooks", "Accuracy of static VQ against codes", places, "codes"
        )


def _tables(suite: Suite) -> Iterator[Table]:
    scores = scores_of(suite)
    columns, places = length_columns(scores), by_length(scores)
    yield wide_table("Accuracy by context length", places, columns, accuracy)
    yield from averaging_table(f"{GAINED} accuracy", places, columns, accuracy)
    yield state_table("Bytes of state by context length", places, columns)
