"""Tables and pictures from run files alone."""

from pathlib import Path
from typing import Any

from ovq.runs import read_run, write_text, written_beside

# Distinct in print and for colour-blind readers. Source: Okabe and Ito, "Color Universal Design".
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dvx+"
COLUMNS = ("run", "context", "slots", "accuracy", "loss", "state")


def read_results(folders: list[Path]) -> list[dict[str, Any]]:
    """One row for each run and evaluated setting, in the order of the folders.

    Returns:
        Dictionaries with ``run`` (name), ``seed``, ``label`` (name and setting), and the fields of
        :func:`ovq.evaluate.evaluate`.

    Raises:
        ValueError: a folder is no run, or a run was not evaluated.
    """
    rows = []
    for folder in folders:
        run = read_run(folder)
        results = run.get("evaluation", {}).get("results", [])
        if not results:
            rule, next_step = "evaluated first", f"run `ovq evaluate {folder}`"
            if run["status"] != "done":
                rule, next_step = "done and evaluated", "the command that trains it goes on"
            raise ValueError(
                f"RUN must be {rule}, got {folder} with status {run['status']!r}: {next_step}"
            )
        name = run["config"]["name"]
        for result in results:
            setting = result["setting"]
            label = name if setting is None else f"{name}, {setting} slots"
            rows.append({"run": name, "seed": run.get("seed"), "label": label, **result})
    return rows


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table as text, in the order of ``COLUMNS``."""
    slots = "" if row["setting"] is None else f"{row['num_centroids']}"
    if row["setting"] not in (None, slots):
        slots += f" ({row['setting']})"
    return (
        row["run"], f"{row['length']:,}", slots, f"{row['accuracy']:.3f}", f"{row['loss']:.3f}",
        f"{row['state_bytes']:,} B",
    )  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return "\n".join(head + ["| " + " | ".join(cells(row)) + " |" for row in rows]) + "\n"


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
        ValueError: as :func:`read_results`.
    """
    rows = read_results(folders)
    sources = ", ".join(str(folder) for folder in folders)
    write_text(output / "table.md", markdown(rows) + f"\nFrom the run files of {sources}.\n")
    draw(rows, output / "accuracy.png")
    return rows
