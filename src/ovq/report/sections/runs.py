"""Runs by themselves: accuracy and state against length, one line a run and setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ovq.report.axes import ACCURACY, NO_SLOTS, lengths_axis, log_axis, styles_in_order
from ovq.report.charts import Chart, line_chart
from ovq.report.run_table import COLUMNS, cells
from ovq.report.scores import in_order
from ovq.report.sections.base import Section, with_data
from ovq.report.tables import Cell, Table


def runs(rows: Sequence[dict[str, Any]], folders: Sequence[Path]) -> Section:
    """What `ovq evaluate` measured of runs, without a plan.

    Args:
        rows: as :func:`ovq.report.read_results` returns them.
        folders: of the runs.
    """
    charts = (_chart(rows, "accuracy", "accuracy"), _chart(rows, "state", "state_bytes"))
    return Section(
        name="runs",
        title="Runs",
        question="How do these runs compare at each length?",
        notes=("From the run files of " + ", ".join(str(folder) for folder in folders) + ".",),
        charts=with_data(charts),
        tables=(_table(rows),),
    )


def _chart(rows: Sequence[dict[str, Any]], name: str, figure: str) -> Chart:
    records = [
        {"run": row["run"], "slots": row["setting"] or NO_SLOTS, "x": row["length"],
         "at": row["length"], **dict.fromkeys(("mean", "low", "high"), row[figure]),
         "accuracy": str(row["accuracy"]),
         "state": f"{row['state_bytes']:,} bytes"}
        for row in sorted(rows, key=lambda row: row["setting"] is not None)
        if row[figure] is not None
    ]  # fmt: skip
    is_accuracy = figure == "accuracy"
    held = log_axis("bytes", [record["mean"] for record in records], "~s")
    return line_chart(
        name, "Accuracy" if is_accuracy else "State of one sequence", records,
        x=lengths_axis([row["length"] for row in rows]),
        y=ACCURACY if is_accuracy else held,
        styles=styles_in_order(in_order(row["run"] for row in rows)), key="run",
        hover=("accuracy", "state"),
    )  # fmt: skip


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = ("length", "num_centroids", "accuracy", "loss", "state_bytes")
    found = [
        tuple(
            Cell(text, None if field is None else row[field])
            for text, field in zip(cells(row), (None, *numbers), strict=True)
        )
        for row in rows
    ]
    return Table(head=COLUMNS, rows=tuple(found), caption="What was measured")
