"""Commands that build the kernel, list recipes and train them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ovq.cli.shared import (
    INTERRUPTED,
    RUNS,
    Threads,
    app,
    console,
    one_line_errors,
    progress_bar,
    say,
    set_up,
)


@app.command()
@one_line_errors
def build(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the compiler's output.")] = False,
) -> None:
    """Build the C++ kernel for CPUs, once; needs g++ or clang++ and ninja."""
    from ovq.ops.ovq_attention.cpu.build import build as build_kernel

    with console.status("building the CPU kernel, about half a minute"):
        path = build_kernel(verbose)
    say(f"the CPU kernel is at {path}")


@app.command()
@one_line_errors
def recipes() -> None:
    """List the recipes."""
    from ovq.recipes import RECIPES

    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, recipe in RECIPES.items():
        table.add_row(name, (recipe.__doc__ or "").splitlines()[0])
    console.print(table)


@app.command()
@one_line_errors
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="See `ovq recipes`.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and data.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Folder of .txt files, for recipes that train on text.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Train a recipe into a run folder; the same command resumes an interrupted run."""
    from ovq.recipes import make_run

    config = make_run(recipe, seed=seed, steps=steps, source=source)
    folder = output or RUNS / config.name
    set_up(threads)
    from ovq.train import train as train_run

    with progress_bar(
        config.name, "loss {task.fields[loss]}", "{task.fields[rate]} tokens/s"
    ) as update:

        def progress(step: int, steps: int, loss: float, rate: float) -> None:
            update(step, steps, loss=f"{loss:.3f}", rate=f"{rate:,.0f}")

        run = train_run(config, folder, progress)
    step = run["training"]["steps"]
    if run["status"] == "interrupted":
        say(f"interrupted at step {step}: the same command goes on from {folder}")
        raise typer.Exit(INTERRUPTED)
    from ovq.report import number

    say(f"{folder}: done, {step} steps, loss {number(run['training']['losses'][-1])}")
