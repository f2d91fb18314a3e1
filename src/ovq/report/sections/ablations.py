"""Ablations: what a model gains or loses against the suite's first one, seed by seed."""

from collections.abc import Iterator
from dataclasses import replace

from ovq.report.axes import Axis
from ovq.report.charts import Chart, dot_chart
from ovq.report.records import Suite
from ovq.report.scores import Score, Values, in_order
from ovq.report.sections.base import (
    HOVER,
    Section,
    accuracy,
    by_length,
    length_columns,
    make_section,
    record_of,
    wide_table,
)
from ovq.report.sections.pairs import by_density
from ovq.report.tables import Table

DRAWN = ("25%", "T/2")


def ablations(suite: Suite) -> Section:
    """Differences from the base at each length and setting."""
    base = suite.entries[0].name
    notes = (
        f"Differences in accuracy from {base} of the same seed, at the same length and setting; "
        "what differs is the model's name. Left of nothing is worse.",
    )
    return make_section(suite, "Ablations", notes, _charts(suite), _tables(suite))


def differences(scores: list[Score]) -> list[tuple[Score, Values]]:
    """Of all scores but the first model's, from its score at the same point, by seed."""
    base = scores[0].model

    def point(score: Score) -> tuple:
        return score.length, score.setting, str(score.changes)

    bases = {point(score): score.accuracy for score in scores if score.model == base}
    nothing = Values(by_seed={}, num_planned=0)
    return [
        (score, score.accuracy.less(bases.get(point(score), nothing)))
        for score in scores
        if score.model != base
    ]


def _settings(scores: list[Score]) -> list[str]:
    known = in_order(score.setting for score in scores if score.setting)
    return [setting for setting in DRAWN if setting in known] or known[:1]


def _charts(suite: Suite) -> Iterator[Chart]:
    for density, scores in by_density(suite).items():
        found = differences(scores)
        rows = in_order(score.model for score, _ in found)
        for setting in _settings(scores):
            of_setting = [(s, values) for s, values in found if s.setting == setting]
            records = [
                record | {"length": score.length}
                for score, values in of_setting
                if (record := record_of(score, score.length, values, score.length))
            ]
            if not records:
                continue
            slots = setting.replace("%", "percent").replace("/", "-")
            yield dot_chart(
                f"ablations-every-{density}-{slots}",
                f"Difference in accuracy, a pair every {density} tokens, slots {setting}",
                records, rows=rows, x=Axis(title="difference in accuracy", format="+.2f"),
                key="length", zero=True,
                keys=sorted({record["length"] for record in records}), hover=HOVER,
            )  # fmt: skip


def _tables(suite: Suite) -> Iterator[Table]:
    for density, scores in by_density(suite).items():
        columns = length_columns(scores)
        gains = {id(score): values for score, values in differences(scores)}
        others = [score for score in scores if id(score) in gains]
        every = f"by context length, a pair every {density} tokens"
        yield wide_table(
            f"Difference in accuracy from {scores[0].model} {every}", by_length(others), columns,
            lambda score, _, gains=gains: gains[id(score)],
        )  # fmt: skip
        whole = wide_table(f"Accuracy {every}", by_length(scores), columns, accuracy)
        yield replace(whole, is_open=False)
