"""Results of tasks, in a run file or a file of their own, and as a table."""

import json
import os
from pathlib import Path
from typing import Any

from ovq.runs import RUN_FILE, check_output_file, read_json, read_run, write_run, write_text

FORMAT = "ovq-harness"
VERSION = 1


def check_place(source: str, output: Path | None) -> Path | None:
    """What keeps the results: a file, a run folder, or nothing.

    Raises:
        ValueError: one that cannot be written to.
    """
    folder = Path(source)
    if output is not None:
        check_output_file(output)
        return output
    if not (folder / RUN_FILE).is_file():
        return None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"RUN must be a folder that can be written to, got {folder}")
    return folder


def read_results(place: Path) -> list[dict[str, Any]]:
    """The results that a run folder, or an output file, holds already.

    Raises:
        ValueError: a file that is something else.
    """
    if place.is_dir():
        return read_run(place).get("harness", {}).get("results", [])
    if not place.exists():
        return []
    return read_json(place, "--output", FORMAT, VERSION, {"results": list})["results"]


def keep(place: Path, result: dict[str, Any]) -> None:
    """Add a result, in place of an older one of the same model, task and limit."""

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return one.get("model"), one["task"], one["limit"]

    others = [other for other in read_results(place) if key(other) != key(result)]
    results = sorted([*others, result], key=lambda one: (one["task"], one["limit"] or 0))
    if place.is_dir():
        write_run(place, read_run(place) | {"harness": {"results": results}})
    else:
        content = {"format": FORMAT, "version": VERSION, "results": results}
        write_text(place, json.dumps(content, indent=1) + "\n")


def table(results: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of results, with the standard error behind a score that has one."""
    names = list(dict.fromkeys(n for r in results for n in r["metrics"] if "_stderr" not in n))
    columns = ("model", "task", "items", *names, "seconds")
    return columns, [
        (
            r["model"], r["task"], f"{r['num_items']:,}",
            *(_cell(r["metrics"], name) for name in names), f"{r['seconds']:,.0f}",
        )
        for r in results
    ]  # fmt: skip


def _cell(metrics: dict[str, float | None], name: str) -> str:
    score, error = metrics.get(name), metrics.get(f"{name}_stderr")
    if score is None:  # no such metric, or no number
        return ""
    return (f"{score:.3f}" if score < 1e4 else f"{score:.3g}") + (
        "" if error is None else f" ± {error:.3f}"
    )
