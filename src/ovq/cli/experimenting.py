"""The command that runs suites of experiments."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ovq.cli.shared import (
    INTERRUPTED,
    RUNS,
    Threads,
    app,
    console,
    one_line_errors,
    parts_of,
    print_table,
    progress_bar,
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

    set_up(threads)
    experiments = make_experiments(suite, scale, quick=quick)
    folder = output or RUNS / ("experiments" if experiments[0].scale == "demo" else
                               f"experiments-{experiments[0].scale}")  # fmt: skip
    names = _known(only, experiments)
    if listed:
        check_output_folder(folder)
        _list(experiments, folder, names)
        return
    failed = 0
    for planned in experiments:
        if names and names.isdisjoint(entry.name for entry in planned.entries):
            continue
        with progress_bar(f"{planned.name}, minutes", "{task.fields[what]}") as update:

            def progress(done: float, total: float, what: str, update=update) -> None:
                update(done, max(total, 0.1), what=what)

            record = run_experiment(
                planned, folder, only=names, progress=progress,
                finished=lambda run, line: console.print(
                    f"{run}: {line}", markup=False, soft_wrap=True
                ),
            )  # fmt: skip
        _print_counts(folder, record)
        if record.get("interrupted"):
            console.print("interrupted: the same command goes on")
            raise typer.Exit(INTERRUPTED)
        failed += record.get("counts", {}).get("failed", 0)
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
        console.print(f"{record['name']}: {counts}; written: {path}", markup=False, soft_wrap=True)


def _list(experiments: list, folder: Path, names: frozenset[str]) -> None:
    from ovq.experiments import total_minutes
    from ovq.experiments.record import known_failures, summarize

    rows = []
    for planned in experiments:
        record = summarize(planned, folder, known_failures(planned, folder))
        for entry, about in zip(planned.entries, record["entries"], strict=True):
            if names and entry.name not in names:
                continue
            statuses = [run["status"] for run in about["runs"]]
            known = planned.scale != "paper"  # measured on two cores alone
            rows.append(
                (
                    f"{planned.name}: {entry.name}",
                    entry.suite,
                    str(len(statuses)),
                    f"{entry.training_minutes:.1f}" if known else "",
                    f"{entry.evaluation_minutes:.1f}" if known else "",
                    f"{planned.minutes(entry):.0f}" if known else "",
                    *(str(statuses.count(s)) for s in ("done", "unfinished", "missing", "failed")),
                )
            )
    columns = ("entry, minutes", "runs in", "runs", "training", "measuring", "in all", "done",
               "unfinished", "missing", "failed")  # fmt: skip
    print_table(columns, rows)
    if experiments[0].scale != "paper" and not names:
        minutes = total_minutes(experiments)
        console.print(
            f"about {minutes:.0f} minutes on two cores if nothing is there; what suites share is "
            f"trained once"
        )
