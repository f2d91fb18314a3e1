"""The command line: ``ovq train``, ``evaluate``, ``generate``, ``report`` and the rest."""

import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ImportError as error:
    sys.exit(f"ovq: the command line needs {error.name}: pip install 'ovq[all]'")
except KeyboardInterrupt:
    print("ovq: interrupted", file=sys.stderr)
    sys.exit(130)

RUNS = Path("runs")
INTERRUPTED = 130
PROMPT_SHOWN = 400  # tokens
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
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores by default.")]


def one_line_errors(command: Callable) -> Callable:
    """Bad input ends a command with one line on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError too
            raise
        except (ValueError, ImportError, OSError, RuntimeError) as error:
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
def _bar(name: str, *columns: str) -> Iterator[Callable[..., None]]:
    """A progress bar with time left: a function of done, total and the fields of the columns.

    It appears with its first update, so that bad input leaves nothing but its one line. Where the
    output is no terminal, every tenth is a line of its own.
    """
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        *(TextColumn(column) for column in columns),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )

    def update(done: int, total: int, **fields: Any) -> None:
        if not bar.task_ids:
            bar.add_task(name, total=total, **fields)
            if console.is_terminal:
                bar.start()
        before = int(bar.tasks[0].completed)
        bar.update(bar.task_ids[0], completed=done, **fields)
        if not console.is_terminal and done * 10 // total > before * 10 // total:
            console.print(bar.get_renderable())

    try:
        yield update
    finally:
        if console.is_terminal and bar.task_ids:
            bar.stop()


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _set_up(threads: int | None) -> None:
    """Set the threads, and keep the progress bars of transformers from ours."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    _set_threads(threads)


@app.callback()
def main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log lines.")] = False,
) -> None:
    """Online vector-quantized attention: train, evaluate and generate."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING)


@app.command()
@one_line_errors
def build(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the compiler's output.")] = False,
) -> None:
    """Build the C++ kernel for CPUs, once; needs g++ or clang++ and ninja."""
    from ovq.ops.ovq_attention.cpu.build import build as build_kernel

    with console.status("building the CPU kernel, about half a minute"):
        path = build_kernel(verbose)
    console.print(f"the CPU kernel is at {path}", soft_wrap=True)


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
    _set_up(threads)
    from ovq.train import train as train_run

    with _bar(config.name, "loss {task.fields[loss]}", "{task.fields[rate]} tokens/s") as update:

        def progress(step: int, steps: int, loss: float, rate: float) -> None:
            update(step, steps, loss=f"{loss:.3f}", rate=f"{rate:,.0f}")

        run = train_run(config, folder, progress)
    step = run["training"]["steps"]
    if run["status"] == "interrupted":
        console.print(f"interrupted at step {step}: the same command goes on from {folder}")
        raise typer.Exit(INTERRUPTED)
    from ovq.report import number

    console.print(f"{folder}: done, {step} steps, loss {number(run['training']['losses'][-1])}")


@app.command()
@one_line_errors
def evaluate(
    runs: Runs,
    lengths: Annotated[
        str, typer.Option(help="Context lengths, such as 128,256; the recipe's by default.")
    ] = "",
    num_centroids: Annotated[
        str, typer.Option(help="Slots of the dictionary, such as 64,T/4 (T: the context).")
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
    from ovq.runs import distinct_folders

    _set_up(threads)
    for folder in distinct_folders(runs):
        with _bar(str(folder), "{task.fields[last]}") as update:

            def progress(done: int, total: int, last: dict, update=update) -> None:
                update(done, total, last=f"T={last['length']:,} accuracy {last['accuracy']:.3f}")

            def known(found: int, total: int, folder=folder) -> None:
                console.print(
                    f"{folder}: {found} of {total} settings were measured before; "
                    "--again measures them again"
                )

            results = evaluate_run(
                folder,
                lengths=tuple(_numbers("lengths", lengths)),
                num_centroids=tuple(part.strip() for part in num_centroids.split(",") if part),
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

        _set_up(threads)
        if data is not None:
            datasets.disable_progress_bars()  # of cleaning items; a download's stay
        if not logging.getLogger().isEnabledFor(logging.INFO):
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks = load_tasks([name.strip() for name in names.split(",") if name.strip()], data)
    results = []
    for model in distinct_folders(models):
        with ExitStack() as bars:
            updates: dict[str, Callable[..., None]] = {}

            def progress(task: str, done: int, total: int, bars=bars, updates=updates, of=model):
                if task not in updates:
                    bars.close()  # the last task's
                    updates[task] = bars.enter_context(_bar(f"{of} {task}"))
                updates[task](done, total)

            def known(found: int, total: int, of: Path = model) -> None:
                console.print(
                    f"{of}: {found} of {total} tasks were measured before; --again measures them "
                    "again"
                )

            results += evaluate_tasks(
                str(model), tasks, limit=limit, batch_size=batch_size, output=output, again=again,
                progress=progress, known=known,
            )  # fmt: skip
    _print_table(*table(results))


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or text.split():  # a comma alone is no number
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{name} must be whole numbers of at least 1, got {part!r}")
    return [int(part) for part in parts]


def _print_results(name: str, results: list[dict]) -> None:
    from ovq.report import COLUMNS, cells

    _print_table(COLUMNS, [cells({"run": name, **result}) for result in results])


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command()
@one_line_errors
def generate(
    run: Run,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with that text.")] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Take so many held-out tokens as the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.7,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the likeliest.")] = None,
    seed: int = 0,
    state: Annotated[
        Path | None, typer.Option(help="What `ovq read` wrote; then a prompt may be left out.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Continue a prompt; once the window is full, the state keeps its size."""
    num_prompts = sum(given is not None for given in (prompt, prompt_file, held_out))
    if num_prompts != 1 and (num_prompts or state is None):
        raise ValueError(
            "exactly one of --prompt, --prompt-file and --held-out must be given, none with --state"
        )
    from ovq.evaluate import generate as continue_prompt
    from ovq.evaluate import held_out_tokens, load_run
    from ovq.reading import Reading

    _set_up(threads)
    text = prompt if prompt_file is None else _read_text("prompt_file", prompt_file)
    config, model = load_run(run)
    task = config.task
    reading = Reading() if state is None else Reading.load(state, model=model)
    ids = task.encode(text or "") if held_out is None else held_out_tokens(task, held_out)
    with console.status(f"{len(ids):,} tokens of prompt, then {max_new_tokens:,} new ones"):
        new, before, after = continue_prompt(
            model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            seed=seed, cache=reading.cache, next_logits=reading.next_logits,
        )  # fmt: skip
    if reading.sources:
        _print_part("what was read", ", then ".join(map(str, reading.sources)))
    if len(ids):
        name = "the end of the prompt" if len(ids) > PROMPT_SHOWN else "the prompt"
        _print_part(name, task.decode(ids[-PROMPT_SHOWN:]))
    _print_part("the model goes on", task.decode(new))
    console.rule()
    of = "in all" if reading.sources else "of the prompt"
    console.print(
        f"state: {before:,} bytes after the {reading.num_tokens + len(ids):,} tokens {of}, "
        f"{after:,} bytes after {len(new):,} more"
    )


def _print_part(name: str, text: str) -> None:
    console.rule(name, align="left")
    console.print(text, markup=False, soft_wrap=True)


@app.command()
@one_line_errors
def read(
    run: Run,
    file: Annotated[Path, typer.Option(help="A file with the text to read.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The state file.")],
    state: Annotated[
        Path | None, typer.Option(help="A state file of what was read before.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens from the start of the text; all by default.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="A JSON file for what was measured.")] = None,
    threads: Threads = None,
) -> None:
    """Read a text into a state file, in bounded memory; goes on if interrupted."""
    from ovq.runs import check_output_file, write_text

    for path in (output, record):
        if path is not None:
            check_output_file(path)
    _set_up(threads)
    from ovq.evaluate import load_run
    from ovq.reading import ReadingInterruptedError, begin_reading, check_output, read_to_file
    from ovq.reading_report import record_of, summary

    check_output(output, state)
    text = _read_text("file", file)
    config, model = load_run(run)
    with console.status(f"the tokens of {file.name}"):
        ids = config.task.encode(text)[:max_tokens]
    begin = begin_reading(model, state, name=file.name, text=text, num_tokens=len(ids))
    begun = time.perf_counter()
    try:
        with _bar(f"reading {file.name}") as update:
            reading, num_new = read_to_file(model, ids, output, begin=begin, progress=update)
    except ReadingInterruptedError as interrupt:
        console.print(f"{interrupt}: the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - begun
    found = record_of(model, reading, output, run=config.name, num_new=num_new, seconds=seconds)
    console.print(summary(found), markup=False, soft_wrap=True)
    if record is not None:
        write_text(record, json.dumps(found, indent=1) + "\n")


def _read_text(name: str, path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} must be UTF-8 text, got {path} with byte {data[error.start]:#04x} at "
            f"{error.start}"
        ) from None


@app.command()
@one_line_errors
def inspect(
    run: Run,
    text: Annotated[Path, typer.Option(help="A file with the text to look at.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path(
        "inspect.html"
    ),
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens from the start of the text.")
    ] = 2048,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Index of one OVQ layer; all by default.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Show on one page which slots a text's tokens join and read, and how the dictionary grows."""
    from ovq.runs import check_output_file

    check_output_file(output)
    _set_up(threads)
    from ovq.evaluate import load_run
    from ovq.inspection import inspect as inspect_text
    from ovq.inspection import write_page

    config, model = load_run(run)
    written, begun = _read_text("text", text), time.perf_counter()
    with _bar("reading") as update:

        def progress(done: int, total: int) -> None:
            if time.perf_counter() - begun > LONG:
                update(done, total)

        content = inspect_text(
            model, config.task, written, name=config.name, source=text.name,
            max_tokens=max_tokens, layer=layer, progress=progress,
        )  # fmt: skip
    size = write_page(content, output)
    shown, given = len(content["tokens"]), content["num_tokens_of_text"]
    of = "" if shown == given else f" of {given:,}"
    console.print(
        f"written: {output}, {size:,} bytes, {shown:,}{of} tokens in layers "
        f"{', '.join(str(part['layer']) for part in content['layers'])}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


@app.command()
@one_line_errors
def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only, a minute.")] = False,
    threads: Threads = None,
) -> None:
    """Time and memory beside PyTorch's softmax attention; run it alone on the machine."""
    from ovq.runs import check_output_folder

    check_output_folder(output)
    from ovq.benchmark import BenchmarkConfig, benchmark
    from ovq.benchmark_report import markdown, write
    from ovq.ops.ovq_attention.cpu.kernel import is_built

    _set_threads(threads)
    implementations = ("torch", "cpu") if is_built() else ("torch",)
    config = BenchmarkConfig(implementations=implementations)
    if quick:
        config = replace(
            config, lengths=(512, 1024, 2048, 4096), num_centroids=(256, 1024), num_repeats=3,
            decode_after=(1024, 8192), decode_tokens=256, memory_lengths=(2048, 8192),
        )  # fmt: skip
    begun, steps = time.perf_counter(), count(1)

    def progress(line: str) -> None:
        seconds = time.perf_counter() - begun
        console.print(f"{next(steps):3} of {config.num_steps} at {seconds:5.0f} s  {line}")

    result = benchmark(config, output, progress)
    write(result, output)
    console.print(markdown(result), markup=False, soft_wrap=True)
    console.print(f"written: {output}/bench.json, table.md, bench.png")


@app.command()
@one_line_errors
def compare(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("compare"),
    mixers: Annotated[
        str, typer.Option(help="Names, such as full_attention,ovq; all by default.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence, such as 2048,8192.")] = "",
    pure: Annotated[
        bool, typer.Option("--pure", help="The mixer in every layer, no sliding window.")
    ] = False,
    budget: Annotated[
        float, typer.Option(help="Seconds for one run; what would take longer is skipped.")
    ] = 120.0,
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths, a minute.")] = False,
    threads: Threads = None,
) -> None:
    """Every mixer in models of equal size; the same command goes on with what is there."""
    from ovq.runs import check_output_folder

    check_output_folder(output)
    numbers = tuple(sorted(set(_numbers("lengths", lengths))))
    _set_up(threads)
    from ovq.comparison import ComparisonConfig
    from ovq.comparison import compare as compare_mixers
    from ovq.comparison.report import markdown, write

    config = ComparisonConfig(pure=pure, budget=budget)
    if quick:
        config = replace(config, lengths=(512, 1024), num_repeats=2, decode_tokens=16)
    if numbers:
        config = replace(config, lengths=numbers)
    if mixers:
        config = replace(config, mixers=tuple(x.strip() for x in mixers.split(",") if x.strip()))
    with _bar("compare", "{task.fields[last]}") as update:

        def progress(done: int, total: int, last: str) -> None:
            update(done, total, last=last)

        result = compare_mixers(config, output / "compare.json", progress)
    write(result, output)
    console.print(markdown(result), markup=False, soft_wrap=True)
    console.print(f"written: {output}/compare.json, table.md, compare.png")


@app.command()
@one_line_errors
def fidelity(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("fidelity"),
    model: Annotated[
        str | None,
        typer.Option(help="A pretrained Llama-type model: a folder, a name, or a .gguf file."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The text it reads.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, a minute.")] = False,
    threads: Threads = None,
) -> None:
    """Error against full attention at equal bytes; the same command goes on with what is there."""
    if (model is None) != (text is None):
        raise ValueError("--model and --text must be given together")
    from ovq.fidelity.measure import FidelityConfig, begun, drawn_samples, measure
    from ovq.fidelity.report import markdown, write
    from ovq.runs import check_output_folder

    check_output_folder(output)
    _set_up(threads)
    config = FidelityConfig(model=model, text=text.name if text is not None else None)
    if quick:
        config = replace(config, length=1024, num_centroids=(32, 64, 128, 256), seeds=(0,))
    samples, total = drawn_samples(config), 2 * len(config.seeds)
    path, data = output / "fidelity.json", {}
    if model is not None and text is not None:
        from ovq.fidelity.pretrained import fingerprint, pretrained_samples

        written, data = _read_text("text", text), fingerprint(model, text)
        if begun(config, path, data)["status"] != "done":
            with console.status("loading the model"):
                of_model, number = pretrained_samples(model, written, config.length)
            samples, total = chain(samples, of_model), total + number
    with _bar("fidelity", "{task.fields[last]}") as update:

        def progress(done: int, total: int, row: dict) -> None:
            where = f"{row['distribution']} {row['part']}"
            update(done, total, last=f"{where}, {row['method']}: {row['error']:.3f}")

        result = measure(config, (samples, total), path, progress, data)
    write(result, output)
    console.print(markdown(result), markup=False, soft_wrap=True)
    console.print(f"written: {output}/fidelity.json, table.md, fidelity.png")


@app.command()
@one_line_errors
def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("report"),
) -> None:
    """Draw evaluated runs: a table here, table.md and accuracy.png in the output folder."""
    from ovq.report import COLUMNS, cells
    from ovq.report import report as write_report

    rows = write_report(runs, output)
    _print_table(COLUMNS, [cells(row) for row in rows])
    console.print(f"written: {output / 'table.md'}, {output / 'accuracy.png'}")


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


if __name__ == "__main__":
    run()
