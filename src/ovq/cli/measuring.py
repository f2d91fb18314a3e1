"""Commands that measure operators and mixers, trained or not: bench, compare, fidelity."""

import time
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from ovq.cli.shared import (
    Threads,
    app,
    console,
    one_line_errors,
    parts_of,
    progress_bar,
    read_text,
    say,
    set_threads,
    set_up,
    whole_numbers,
)


@app.command()
@one_line_errors
def bench(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths only, a minute.")] = False,
    threads: Threads = None,
) -> None:
    """Time and memory beside PyTorch's softmax attention; run it alone on the machine."""
    from ovq.runs import check_output_record

    check_output_record(output, "bench.json", "ovq-bench", ("table.md", "bench.png"))
    from ovq.benchmark import BenchmarkConfig, benchmark
    from ovq.benchmark_report import markdown, write
    from ovq.ops.ovq_attention.cpu.kernel import is_built

    set_threads(threads)
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
        say(f"{next(steps):3} of {config.num_steps} at {seconds:5.0f} s  {line}")

    result = benchmark(config, output, progress)
    write(result, output)
    say(markdown(result))
    say(f"written: {output}/bench.json, table.md, bench.png")


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
    from ovq.runs import check_output_record

    check_output_record(output, "compare.json", "ovq-compare", ("table.md", "compare.png"))
    numbers = tuple(sorted(set(whole_numbers("lengths", lengths))))
    set_up(threads)
    from ovq.comparison import ComparisonConfig
    from ovq.comparison import compare as compare_mixers
    from ovq.comparison.report import markdown, write

    config = ComparisonConfig(pure=pure, budget=budget)
    if quick:
        config = replace(config, lengths=(512, 1024), num_repeats=2, decode_tokens=16)
    if numbers:
        config = replace(config, lengths=numbers)
    if mixers:
        config = replace(config, mixers=tuple(parts_of(mixers)))
    with progress_bar("compare", "{task.fields[last]}") as update:

        def progress(done: int, total: int, last: str) -> None:
            update(done, total, last=last)

        result = compare_mixers(config, output / "compare.json", progress)
    write(result, output)
    say(markdown(result))
    say(f"written: {output}/compare.json, table.md, compare.png")


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
    from ovq.runs import check_output_record

    check_output_record(output, "fidelity.json", "ovq-fidelity", ("table.md", "fidelity.png"))
    set_up(threads)
    config = FidelityConfig(model=model, text=text.name if text is not None else None)
    if quick:
        config = replace(config, length=1024, num_centroids=(32, 64, 128, 256), seeds=(0,))
    samples, total = drawn_samples(config), 2 * len(config.seeds)
    path, data = output / "fidelity.json", {}
    if model is not None and text is not None:
        from ovq.fidelity.pretrained import fingerprint, pretrained_samples

        written, data = read_text("text", text), fingerprint(model, text)
        if begun(config, path, data)["status"] != "done":
            with console.status("loading the model"):
                of_model, number = pretrained_samples(model, written, config.length)
            samples, total = chain(samples, of_model), total + number
    with progress_bar("fidelity", "{task.fields[last]}") as update:

        def progress(done: int, total: int, row: dict) -> None:
            where = f"{row['distribution']} {row['part']}"
            update(done, total, last=f"{where}, {row['method']}: {row['error']:.3f}")

        result = measure(config, (samples, total), path, progress, data)
    write(result, output)
    say(markdown(result))
    say(f"written: {output}/fidelity.json, table.md, fidelity.png")
