"""The command that runs suites of experiments."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ovq.cli.shared import (
    INTERRUPTED,
    RUNS,
    Threads,
    app,
    one_line_errors,
    parts_of,
    print_table,
    progress_bar,
    say,
    set_up,
)
from ovq.runs import check_output_folder


@app.command()
@one_line_errors
def experiment(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="recall, positional, regression, forgetting, mqar, ablations, capacity, or all.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of all suites; one below runs by default."),
    ] = None,
    scale: Annotated[str, typer.Option(help="demo for two cores, paper for GPUs.")] = "demo",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes a suite: that it runs, not what is true.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Names of models to run, comma-separated; all by default.")
    ] = "",
    listed: Annotated[
        bool, typer.Option("--list", help="What is planned, done and missing; run nothing.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Train and measure all models of a suite; the same command goes on if interrupted."""
    from ovq.experiments import make_experiments, run_experiment
    from ovq.experiments.record import known_failures

    set_up(threads)
    experiments = make_experiments(suite, scale, quick=quick)
    folder = output or RUNS / ("experiments" if experiments[0].scale == "demo" else
                               f"experiments-{experiments[0].scale}")  # fmt: skip
    names = _known(only, experiments)
    for planned in experiments:
        check_output_folder(folder / planned.name)
    if listed:
        _list(experiments, folder, names)
        return
    for planned in experiments:  # before hours of another suite
        known_failures(planned, folder)
    failed = 0
    for planned in experiments:
        if names and names.isdisjoint(entry.name for entry in planned.entries):
            continue
        with progress_bar(f"{planned.name}, minutes", "{task.fields[what]}") as update:

            def progress(done: float, total: float, what: str, update=update) -> None:
                update(done, max(total, 0.1), what=what)

            record = run_experiment(
                planned, folder, only=names, progress=progress,
                finished=lambda run, line: say(f"{run}: {line}"),
            )  # fmt: skip
        _print_counts(folder, record)
        if record.get("interrupted"):
            say("interrupted: the same command goes on")
            raise typer.Exit(INTERRUPTED)
        failed += record.get("counts", {}).get("failed", 0)
    if quick:
        say("quick: this shows that everything runs; its scores say nothing of the models")
    if failed:
        raise typer.Exit(1)


def _known(text: str, experiments: list) -> frozenset[str]:
    """The names in a comma-separated text, each of some entry."""
    names = frozenset(parts_of(text))
    known = {entry.name: None for planned in experiments for entry in planned.entries}
    if text and not names:
        raise ValueError(f"--only must name some of {', '.join(known)}, got {text!r}")
    for name in sorted(names - known.keys()):
        raise ValueError(f"--only must name some of {', '.join(known)}, got {name!r}")
    return names


def _print_counts(folder: Path, record: dict[str, Any]) -> None:
    if record.get("counts"):  # of the first process
        counts = ", ".join(f"{number} {status}" for status, number in record["counts"].items())
        path = folder / record["name"] / "experiment.json"
        say(f"{record['name']}: {counts}; written: {path}")


def _list(experiments: list, folder: Path, names: frozenset[str]) -> None:
    """A table of all entries, why runs of them failed, and the minutes left.

    Raises:
        ValueError: a suite whose record cannot be read; after the others are shown.
    """
    from ovq.experiments import total_minutes
    from ovq.experiments.record import known_failures, summarize, total_left

    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    damages: dict[str, list[str]] = {}  # the suites that each concerns
    for planned in experiments:
        try:
            record = summarize(planned, folder, known_failures(planned, folder))
        except ValueError as error:
            damages.setdefault(str(error), []).append(planned.name)
            continue
        for entry, about in zip(planned.entries, record["entries"], strict=True):
            if not names or entry.name in names:
                rows.append(_row(planned, entry, about["runs"], folder))
                reasons += [f"{r['folder']}: {r['reason']}" for r in about["runs"] if "reason" in r]
    columns = ("entry, minutes", "runs in", "runs", "training", "measuring", "in all", "left",
               "done", "unfinished", "missing", "failed")  # fmt: skip
    if rows:
        print_table(columns, rows)
    for reason in dict.fromkeys(reasons):
        say(f"failed: {reason}")
    if damages:
        raise ValueError("; ".join(f"{', '.join(of)}: {what}" for what, of in damages.items()))
    if experiments[0].scale != "paper" and not names:
        left, whole = total_left(experiments, folder), total_minutes(experiments)
        say(
            f"about {left:.0f} minutes left of {whole:.0f}, where two suites at a time have a core "
            "each (--threads 1); what suites share is trained once"
        )
    if not folder.exists():
        say(f"nothing is in {folder} yet; -o names another folder")


def _row(planned: Any, entry: Any, runs: list[dict[str, Any]], folder: Path) -> tuple[str, ...]:
    """An entry of the list."""
    from ovq.experiments.record import minutes_left

    minutes = ("", "", "", "")
    if planned.scale != "paper":  # measured on two cores alone
        each, left = planned.minutes(entry), sum(minutes_left(planned, entry, folder))
        parts = (entry.training_minutes, entry.evaluation_minutes, each, left)
        minutes = tuple(f"{part:.1f}" for part in parts)
    statuses = [run["status"] for run in runs]
    counts = (str(statuses.count(name)) for name in ("done", "unfinished", "missing", "failed"))
    return f"{planned.name}: {entry.name}", entry.suite, str(len(statuses)), *minutes, *counts
