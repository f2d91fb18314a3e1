"""Costs: how fast models were trained, and what they take against the length of the context."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ovq.report.axes import lengths_axis, log_axis
from ovq.report.charts import Chart, dot_chart, line_chart
from ovq.report.records import Suite, SuiteEntry
from ovq.report.scores import Values, in_order
from ovq.report.sections.base import SPREAD, Section, styles_of_mixers, with_data
from ovq.report.tables import Cell, Table

FIGURES = {
    "forward": "time of a forward call",
    "forward+backward": "time of a training step",
    "decode": "time of a decoded token",
    "memory": "peak memory of a training step",
}

SPEED = (
    "Training speed is that of the runs as they were trained, beside other work or not; where a "
    "run was interrupted, of its last stretch."
)

Comparison = Mapping[str, Any]
Speeds = dict[str, dict[str, Values]]  # by model and suite


def costs(suites: Iterable[Suite], comparisons: Mapping[Path, Comparison]) -> Section | None:
    """Training speeds of the suites' runs, and ratios from records of comparisons.

    Returns:
        ``None`` where there is neither.
    """
    speeds = _speeds(suites)
    charts = [_speeds_chart(speeds)]
    names = _names(comparisons)
    charts += [c for path, found in comparisons.items() for c in _charts(names[path], found)]
    tables = [_speeds_table(speeds)] if speeds else []
    tables += [_ratio_table(path, found) for path, found in comparisons.items()]
    notes = [f"{SPEED} {SPREAD}"] if speeds else []
    notes += [_about(path, found) for path, found in comparisons.items()]
    if not notes:
        return None
    return Section(
        name="costs",
        title="Costs",
        question="What does it cost: training speed, decoding time and memory at each length?",
        notes=tuple(notes),
        charts=with_data(charts),
        tables=tuple(tables),
    )


def training_speed(suite: Suite, entry: SuiteEntry) -> Values:
    """Tokens a second of the entry's trained runs at the chosen rate, by seed."""
    found = {
        run.seed: _speed_of(run.run)
        for run in entry.runs
        if run.is_measured and run.run and _speed_of(run.run)
    }
    return Values(by_seed=found, num_planned=len(suite.seeds))


def _speed_of(run: Mapping[str, Any]) -> float:
    """Tokens a second; 0 before it is done, and where the last call had no step left to do."""
    is_done = run["status"] == "done"
    return float(run.get("training", {}).get("tokens_per_second", 0.0)) if is_done else 0.0


def _speeds(suites: Iterable[Suite]) -> Speeds:
    """Training speeds by model and suite, of those that have any."""
    found: Speeds = {}
    for suite in suites:
        for entry in suite.entries:
            values = training_speed(suite, entry)
            if values.by_seed:
                found.setdefault(entry.name, {})[suite.name] = values
    return found


def _speeds_chart(speeds: Speeds) -> Chart:
    records = [
        {"model": model, "suite": suite, "mean": values.mean, "low": values.low,
         "high": values.high, "tokens a second": values.text("{:,.0f}".format)}
        for model, found in speeds.items()
        for suite, values in found.items()
    ]  # fmt: skip
    ends = [record[end] for record in records for end in ("low", "high")]
    return dot_chart(
        "costs-training", "Training speed", records, rows=list(speeds), key="suite",
        x=log_axis("tokens a second", ends, "~s"), hover=("tokens a second",),
        keys=in_order(record["suite"] for record in records),
    )  # fmt: skip


def _speeds_table(speeds: Speeds) -> Table:
    columns = in_order(name for found in speeds.values() for name in found)
    rows = tuple(
        (Cell(model), *(_speed(found.get(name)) for name in columns))
        for model, found in speeds.items()
    )
    return Table(head=("model", *columns), rows=rows, caption="Training, tokens a second by suite")


def _speed(values: Values | None) -> Cell:
    if values is None:
        return Cell("")
    form = "{:,.0f}".format
    return Cell(values.text(form), values.mean, values.each(form))


def ratios(comparison: Comparison) -> dict[tuple[str, str, int], float]:
    """Medians by figure, mixer and length, over those of the reference at that length."""
    medians = {
        (row["figure"], row["mixer"], row["length"]): median(row["samples"])
        for row in comparison["figures"]
        if row["samples"]
    }
    of = comparison["reference"]
    return {
        (figure, mixer, length): found / medians[figure, of, length]
        for (figure, mixer, length), found in medians.items()
        if (figure, of, length) in medians
    }


def _about(path: Path, comparison: Comparison) -> str:
    machine = comparison["machine"]
    return (
        f"{path}: `{comparison['command']}` on {machine.get('processor')}, "
        f"{machine.get('threads')} threads, torch {machine.get('torch')}, status "
        f"{comparison.get('status')}. Untrained models; medians over those of "
        f"{comparison['reference']} at the same length, so that less is better."
    )


def _names(paths: Iterable[Path]) -> dict[Path, str]:
    """A name for each comparison: that of its folder, numbered where several have it."""
    found: dict[Path, str] = {}
    for path in paths:
        name = re.sub(r"[^\w.-]", "-", path.resolve().parent.name) or "compare"
        taken, number = set(found.values()), 1
        while (name if number == 1 else f"{name}-{number}") in taken:
            number += 1
        found[path] = name if number == 1 else f"{name}-{number}"
    return found


def _charts(name: str, comparison: Comparison) -> Iterator[Chart]:
    found = ratios(comparison)
    styles = styles_of_mixers({name: name for name in comparison["models"]})
    for figure, what in FIGURES.items():
        records = [
            {"mixer": mixer, "slots": "", "x": length, "at": length, "mean": ratio, "low": ratio,
             "high": ratio, "ratio": f"{ratio:.3f}"}
            for (measured, mixer, length), ratio in found.items()
            if measured == figure
        ]  # fmt: skip
        if records:
            yield line_chart(
                f"costs-{name}-{figure.replace('+', '-')}",
                f"{what.capitalize()}, over {comparison['reference']}'s",
                records, x=lengths_axis([record["x"] for record in records]),
                y=log_axis("ratio", [record["mean"] for record in records]),
                styles=styles, key="mixer", hover=("ratio",),
            )  # fmt: skip


def _ratio_table(path: Path, comparison: Comparison) -> Table:
    found = ratios(comparison)
    told = {(row["figure"], row["mixer"], row["length"]): row for row in comparison["figures"]}
    columns = in_order((figure, length) for figure, _, length in told)
    rows = [
        (
            Cell(mixer),
            *(_ratio(found.get((f, mixer, t)), told.get((f, mixer, t))) for f, t in columns),
        )
        for mixer in comparison["models"]
    ]
    head = ("mixer", *(f"{figure}, {length:,}" for figure, length in columns))
    caption = f"Medians over those of {comparison['reference']}, from {path}"
    return Table(head=head, rows=tuple(rows), caption=caption)


def _ratio(value: float | None, row: Mapping[str, Any] | None) -> Cell:
    """A ratio, or why there is none."""
    if value is not None:
        return Cell(f"{value:.2f}", value)
    if row and row["samples"]:
        return Cell(f"{median(row['samples']):.4g}, without the reference")
    why = row.get("skipped") if row else None
    return Cell(f"not measured: {why}" if why else "not measured")
