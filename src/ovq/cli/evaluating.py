"""The command that evaluates trained runs."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ovq.cli.shared import (
    Runs,
    Threads,
    app,
    console,
    one_line_errors,
    parts_of,
    print_table,
    progress_bar,
    say,
    set_up,
    whole_numbers,
)


@app.command()
@one_line_errors
def evaluate(
    runs: Runs,
    lengths: Annotated[
        str, typer.Option(help="Context lengths, such as 128,256; the recipe's by default.")
    ] = "",
    num_centroids: Annotated[
        str,
        typer.Option(
            help="Slots of the dictionary, such as 64,T/4,25%:T/128: a number, a share of the "
            "context T or of full attention's bytes, and after a colon the tokens of a chunk; "
            "with :kept in the end, slots stay as their first chunk left them."
        ),
    ] = "",
    num_sequences: Annotated[int | None, typer.Option(help="Sequences a setting.")] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, such as piqa,arc_easy; RUN is then any model.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' items; the hub's by default.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First items of each task only.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of tasks; changes no score.")] = 8,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A JSON file for the tasks' scores, not the run file."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what was measured before.")] = False,
    threads: Threads = None,
) -> None:
    """Evaluate runs at any length and dictionary, or models on tasks; goes on if interrupted."""
    if tasks:
        if lengths or num_centroids or num_sequences is not None:
            raise ValueError(
                "--lengths, --num-centroids and --num-sequences do not go with --tasks"
            )
        _evaluate_tasks(runs, tasks, data, limit, batch_size, output, again, threads)
        return
    if data is not None or limit is not None or output is not None:
        raise ValueError("--data, --limit and --output go with --tasks only")
    from ovq.evaluate import evaluate as evaluate_run
    from ovq.report import number
    from ovq.runs import distinct_folders

    set_up(threads)
    for folder in distinct_folders(runs):
        with progress_bar(str(folder), "{task.fields[last]}") as update:

            def progress(done: int, total: int, last: dict, update=update) -> None:
                what = "loss" if last["accuracy"] is None else "accuracy"
                update(done, total, last=f"T={last['length']:,} {what} {number(last[what])}")

            def known(found: int, total: int, folder=folder) -> None:
                say(
                    f"{folder}: {found} of {total} settings were measured before; "
                    "--again measures them again"
                )

            results = evaluate_run(
                folder,
                lengths=tuple(whole_numbers("lengths", lengths)),
                num_centroids=tuple(parts_of(num_centroids)),
                num_sequences=num_sequences,
                again=again,
                progress=progress,
                known=known,
            )
        _print_results(folder.resolve().name, results)


def _evaluate_tasks(
    models: list[Path], names: str, data: Path | None, limit: int | None, batch_size: int,
    output: Path | None, again: bool, threads: int | None,
) -> None:  # fmt: skip
    from ovq.runs import distinct_folders

    with console.status("lm-eval looks for the tasks; its own list takes half a minute"):
        import datasets

        from ovq.harness import evaluate_tasks, load_tasks, table

        set_up(threads)
        if data is not None:
            datasets.disable_progress_bars()  # of cleaning items; a download's stay
        if not logging.getLogger().isEnabledFor(logging.INFO):
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks = load_tasks(parts_of(names), data)
    results = []
    for model in distinct_folders(models):
        with ExitStack() as bars:
            updates: dict[str, Callable[..., None]] = {}

            def progress(task: str, done: int, total: int, bars=bars, updates=updates, of=model):
                if task not in updates:
                    bars.close()  # the last task's
                    updates[task] = bars.enter_context(progress_bar(f"{of} {task}"))
                updates[task](done, total)

            def known(found: int, total: int, of: Path = model) -> None:
                say(
                    f"{of}: {found} of {total} tasks were measured before; --again measures them "
                    "again"
                )

            results += evaluate_tasks(
                str(model), tasks, limit=limit, batch_size=batch_size, output=output, again=again,
                progress=progress, known=known,
            )  # fmt: skip
    print_table(*table(results))


def _print_results(name: str, results: list[dict]) -> None:
    from ovq.report import COLUMNS, cells

    print_table(COLUMNS, [cells({"run": name, **result}) for result in results])
