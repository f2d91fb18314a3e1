"""The command that draws what was found."""

from pathlib import Path
from typing import Annotated

import typer

from ovq.cli.shared import app, one_line_errors, print_table, progress_bar, say


@app.command()
@one_line_errors
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, folders of experiments, or folders with a compare.json.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("report"),
) -> None:
    """Draw what was measured: one page that needs no network, its pictures, tables as Markdown."""
    from ovq.report import COLUMNS, cells
    from ovq.report import report as write_report

    with progress_bar("pictures") as update:
        found = write_report(folders, output, update)
    if found.rows:
        print_table(COLUMNS, [cells(row) for row in found.rows])
    for name, counts in found.counts.items():
        told = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
        say(f"{name}: {told or 'nothing is planned'}")
    pages = [path for path in found.files if path.suffix != ".png"]
    pictures = len(found.files) - len(pages)
    written = ", ".join(map(str, pages))
    say(f"written: {written}, {pictures} pictures")
