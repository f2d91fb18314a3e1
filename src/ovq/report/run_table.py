"""The table of runs by themselves, as `ovq evaluate` measured them."""

from pathlib import Path
from typing import Any

from ovq.report.tables import markdown_table, number
from ovq.runs import distinct_folders, read_run

COLUMNS = ("run", "context", "slots", "accuracy", "loss", "state")


def read_results(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each run and evaluated setting, in the order of the folders, each read once.

    Where a setting was evaluated on several numbers of sequences, the row is that of the most.

    Returns:
        Dictionaries with ``run`` (see :func:`run_labels`), ``seed``, ``label`` (that and the
        setting), and the fields of :func:`ovq.evaluate.evaluate`.

    Raises:
        ValueError: a folder is no run, or a run was not evaluated.
    """
    rows = []
    runs = {folder: read_run(folder) for folder in distinct_folders(folders)}
    labels = run_labels(runs)
    for folder, run in runs.items():
        results = run.get("evaluation", {}).get("results", [])
        if not results:
            rule, next_step = "evaluated first", f"run `ovq evaluate {folder}`"
            if "conversion" in run["config"]:
                rule, next_step = "trained on a task", "for a converted one see `ovq perplexity`"
            if run["status"] != "done":
                rule, next_step = "done and evaluated", "the command that trains it goes on"
            raise ValueError(
                f"RUN must be {rule}, got {folder} with status {run['status']!r}: {next_step}"
            )
        name = labels[folder]
        for result in _of_most_sequences(results):
            setting = result["setting"]
            label = name if setting is None else f"{name}, {setting} slots"
            rows.append({"run": name, "seed": run.get("seed"), "label": label, **result})
    return rows


def _of_most_sequences(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the results of one setting, that over the most sequences, in the place of the first."""
    most: dict[str, dict[str, Any]] = {}
    for result in results:
        key = repr((result["length"], result["setting"], result.get("changes", {})))
        if key not in most or result["num_sequences"] > most[key]["num_sequences"]:
            most[key] = result
    return list(most.values())


def run_labels(runs: dict[Path, dict[str, Any]]) -> dict[Path, str]:
    """A label of its own for each run: the recipe's name, and what tells runs of one recipe apart.

    That is the seed, else the folder's name, else its path.
    """
    by_name: dict[str, list[Path]] = {}
    for folder, run in runs.items():
        by_name.setdefault(run["config"].get("name", folder.name), []).append(folder)
    labels = {}
    for name, folders in by_name.items():
        forms = (
            [name] * len(folders),
            [f"{name}, seed {runs[folder].get('seed')}" for folder in folders],
            [f"{name}, {folder.resolve().name}" for folder in folders],
            [f"{name}, {folder.resolve()}" for folder in folders],
        )
        labels |= zip(folders, next(f for f in forms if len({*f}) == len(f)), strict=True)
    return {folder: labels[folder] for folder in runs}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table as text, in the order of ``COLUMNS``."""
    slots = "" if row["setting"] is None else f"{row['num_centroids']}"
    if row["setting"] not in (None, slots):
        slots += f" ({row['setting']})"
    return (
        row["run"], f"{row['length']:,}", slots, number(row["accuracy"]), number(row["loss"]),
        f"{row['state_bytes']:,} B",
    )  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(COLUMNS, [cells(row) for row in rows])
