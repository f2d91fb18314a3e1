"""Tables and pictures from run files alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ovq.runs import (
    check_output_folder,
    distinct_folders,
    read_run,
    write_text,
    written_beside,
)

# Distinct in print and for colour-blind readers. Source: Okabe and Ito, "Color Universal Design".
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dvx+"
COLUMNS = ("run", "context", "slots", "accuracy", "loss", "state")


def read_results(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each run and evaluated setting, in the order of the folders, each read once.

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
            if run["status"] != "done":
                rule, next_step = "done and evaluated", "the command that trains it goes on"
            raise ValueError(
                f"RUN must be {rule}, got {folder} with status {run['status']!r}: {next_step}"
            )
        name = labels[folder]
        for result in results:
            setting = result["setting"]
            label = name if setting is None else f"{name}, {setting} slots"
            rows.append({"run": name, "seed": run.get("seed"), "label": label, **result})
    return rows


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


def number(value: float | None) -> str:
    """A metric as text; run files hold no NaN but null."""
    return "nan" if value is None else f"{value:.3f}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(COLUMNS, [cells(row) for row in rows])


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy and state bytes against context length, one line a model and setting, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10.0, 4.6)
    panels = figure.subplots(1, 2)
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for index, label in enumerate(labels):
        of_label = sorted((r for r in rows if r["label"] == label), key=lambda row: row["length"])
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "label": label,
        }
        lengths = [row["length"] for row in of_label]
        panels[0].plot(lengths, [row["accuracy"] for row in of_label], **style)
        panels[1].plot(lengths, [row["state_bytes"] for row in of_label], **style)
    ticks = sorted({row["length"] for row in rows})
    for panel, title in zip(panels, ("accuracy", "bytes of state, one sequence"), strict=True):
        panel.set_title(title)
        panel.set_xlabel("context length, tokens")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(-0.02, 1.05)
    panels[1].set_yscale("log")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'ovq[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as a PNG, beside its place first, then renamed onto it."""
    with written_beside(path) as beside:
        figure.savefig(beside, format="png", dpi=150)


def report(folders: list[Path], output: Path) -> list[dict[str, Any]]:
    """Write ``table.md`` and ``accuracy.png`` into a folder, and return the rows.

    Raises:
        ValueError: as :func:`read_results`, or an output that cannot be written.
    """
    check_output_folder(output)
    rows = read_results(folders)
    sources = ", ".join(str(folder) for folder in distinct_folders(folders))
    write_text(output / "table.md", markdown(rows) + f"\nFrom the run files of {sources}.\n")
    draw(rows, output / "accuracy.png")
    return rows
