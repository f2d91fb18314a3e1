"""What all commands share: the application, one-line errors, progress, and options by name."""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column, Table
    from rich.text import Text
except ImportError as error:
    sys.exit(f"ovq: the command line needs {error.name}: pip install 'ovq[all]'")
except KeyboardInterrupt:
    print("ovq: interrupted", file=sys.stderr)
    sys.exit(130)

RUNS = Path("runs")
INTERRUPTED = 130
LONG = 2.0  # seconds without a sign of life
USAGE_ERROR: Any = typer.BadParameter.__base__  # of the click that typer carries

app = typer.Typer(
    help="Online vector-quantized attention: train, evaluate and generate.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=1024, help="CPU threads; all cores by default.")
]


def one_line_errors(command: Callable) -> Callable:
    """Bad input ends a command with one line on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError too
            raise
        except (
            ValueError, ImportError, OSError, RuntimeError, ArithmeticError, MemoryError,
        ) as error:  # fmt: skip
            if _is_interrupt(error):
                print("ovq: interrupted", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None
            message = " ".join(str(error).split())
            if isinstance(error, ModuleNotFoundError) and "pip install" not in message:
                message += ": pip install 'ovq[all]'"
            print(f"ovq: {message}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("ovq: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    return run


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: packages that import lazily report it as one of theirs."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def progress_bar(name: str, *columns: str) -> Iterator[Callable[..., None]]:
    """A progress bar with time left: a function of done, total and the fields of the columns.

    It appears with its first update, so that bad input leaves nothing but its one line. Where the
    output is no terminal, the first step and every tenth are lines of their own. Where a line is
    too narrow, the columns are cut, and not the time left.
    """
    short = Column(no_wrap=True, max_width=30)
    cut = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=short),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[counted]}"),
        TextColumn("  ".join(columns), markup=False, table_column=cut),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )

    def update(done: int | float, total: int | float, **fields: Any) -> None:
        digits = 0 if isinstance(total, int) else 1
        fields["counted"] = f"{done:.{digits}f}/{total:.{digits}f}"
        if not bar.task_ids:
            bar.add_task(name, total=total, **fields)
            if console.is_terminal:
                bar.start()
        before = bar.tasks[0].completed
        bar.update(bar.task_ids[0], completed=done, **fields)
        is_first = not console.is_terminal and before == 0 < done
        if not console.is_terminal and (is_first or _tenths(done, total) > _tenths(before, total)):
            console.print(bar.get_renderable())

    try:
        yield update
    finally:
        if console.is_terminal and bar.task_ids:
            bar.stop()


def _tenths(done: int | float, total: int | float) -> int:
    """Whole tenths of what is to be done."""
    return int(done * 10 / total)


def set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def set_up(threads: int | None) -> None:
    """Set the threads, and keep the progress bars of transformers from ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    set_threads(threads)


@app.callback()
def main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log lines.")] = False,
) -> None:
    """Online vector-quantized attention: train, evaluate and generate."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)


def parts_of(text: str) -> list[str]:
    """What stands between commas, without blanks; nothing between two of them is left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(name: str, text: str) -> list[int]:
    parts = parts_of(text)
    for part in parts or text.split():  # a comma alone is no number
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{name} must be whole numbers of at least 1, got {part!r}")
    return [int(part) for part in parts]


def say(text: str) -> None:
    """Print a line or a text as it is: no part of a path is markup, and none is broken off."""
    console.print(text, markup=False, soft_wrap=True)


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(Text, row))  # no part of a name is markup
    console.print(table)


def read_text(name: str, path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"--{name.replace('_', '-')} must be a file that is there, got {path}")
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} must be UTF-8 text, got {path} with byte {data[error.start]:#04x} at "
            f"{error.start}"
        ) from None


def run() -> None:
    """The entry point: wrong usage is one line too."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        sys.exit(app(arguments, standalone_mode=False))
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context else "ovq"
        print(f"ovq: {error.format_message()} (see `{where} --help`)", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("ovq: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
