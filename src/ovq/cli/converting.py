"""Commands around pretrained models: convert one, and measure perplexity on a long text."""

from collections.abc import Iterable
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovq.cli.shared import (
    Runs,
    Threads,
    app,
    one_line_errors,
    print_table,
    progress_bar,
    read_text,
    say,
    set_up,
    whole_numbers,
)

if TYPE_CHECKING:
    from ovq.conversion import LayerPlan


@app.command()
@one_line_errors
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A pretrained Llama-type model: a folder, a name, or a .gguf file.",
        ),
    ],
    pattern: Annotated[
        str,
        typer.Option(
            help="Mixers, the tokens they hold, and layers in a row, repeated over all layers: "
            "windowed_ovq:512*2,full_attention."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The run folder.")],
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens a state has the bytes of, where the pattern is silent."),
    ] = 1024,
    first_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens at the start that stay exact for good.")
    ] = 4,
    slots: Annotated[
        float, typer.Option(help="Share of a windowed OVQ layer's bytes for its dictionary.")
    ] = 0.25,
    distance: Annotated[
        int, typer.Option(min=0, help="Tokens between a query and the dictionary, for its RoPE.")
    ] = 2048,
    distill: Annotated[
        Path | None,
        typer.Option(help="A folder of .txt files, or kjv, to fit the dictionaries' biases on."),
    ] = None,
    distill_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of that; 20 by default.")
    ] = None,
    distill_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a step; 4096 by default.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Put other mixers in the place of a pretrained model's attention, and keep its weights.

    They are written in float32, whatever they are in.
    """
    from ovq.runs import check_output_folder

    check_output_folder(output)
    if distill is None and (distill_steps, distill_length) != (None, None):
        raise ValueError("--distill-steps and --distill-length go with --distill only")
    set_up(threads)
    from ovq.conversion import Conversion, convert_to_run

    plan = Conversion(
        pattern=pattern, tokens=tokens, num_first_tokens=first_tokens, share_of_slots=slots,
        distance=distance, texts=None if distill is None else str(distill),
        distill_steps=0 if distill is None else distill_steps or 20,
        distill_length=distill_length or 4096,
    )  # fmt: skip
    with progress_bar("distilling", "divergence {task.fields[last]}") as update:

        def progress(done: int, total: int, divergence: float) -> None:
            update(done, total, last=f"{divergence:.5f} nats")

        run = convert_to_run(source, plan, output, progress)
    for line in run.get("divergence", {}).items():
        say("divergence from SOURCE {} the fit: {:.5f} nats a token".format(*line))
    # A run of before there was such a field tells the pattern once.
    number = run["config"]["model"].get("num_hidden_layers", len(plan.layers))
    layers = islice(cycle(plan.layers), number)
    say(
        f"{output}: {run['num_parameters']:,} parameters of {source}; layers in order: "
        f"{_in_order(layers)}"
    )


def _in_order(layers: Iterable["LayerPlan"]) -> str:
    """Layers in words, those of one kind in a row together."""
    rows = ((layer, sum(1 for _ in same)) for layer, same in groupby(layers))
    return ", ".join(
        f"{number} {layer.name}" + (f" of {layer.tokens:,}" if layer.tokens else "")
        for layer, number in rows
    )


@app.command()
@one_line_errors
def perplexity(
    runs: Runs,
    file: Annotated[Path, typer.Option(help="A file with the text.")],
    lengths: Annotated[
        str, typer.Option(help="Tokens from the start of the text, such as 2048,8192.")
    ] = "2048,8192",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A JSON file for what was measured.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Perplexity of a long text, read once from its start; goes on if interrupted.

    Beside it, how far each model's mean loss is above the first one's, in thousandths of a nat a
    token, with the standard error over blocks of 256 tokens.
    """
    from ovq.runs import check_output_file, distinct_folders, read_run, write_text

    if output is not None:
        check_output_file(output)
        _check_table(output, file)
    set_up(threads)
    from ovq.loading import first_tokens, load_text_model
    from ovq.perplexity import (
        check_lengths,
        check_tokens,
        keep,
        markdown,
        measure,
        read_record,
        table,
    )

    numbers, text = sorted({*whole_numbers("lengths", lengths)}), read_text("file", file)
    check_lengths(numbers)
    read = {folder: read_run(folder) for folder in distinct_folders(runs)}
    record = read_record(output, file.name, text, numbers)
    for folder, run in read.items():
        about = {"weights": run.get("weights"), "model": run["config"].get("model")}
        if about.items() <= record["models"].get(str(folder), {}).items():
            say(f"{folder}: measured before")
            continue
        if str(folder) in record["models"]:
            say(f"{folder}: measured anew, since it has changed")
        model, codec = load_text_model(folder)
        ids = first_tokens(codec, text, numbers[-1])
        if len(ids) < numbers[-1]:
            raise ValueError(f"--lengths must be at most the {len(ids):,} tokens of {file}")
        check_tokens(record, str(folder), ids)
        with progress_bar(str(folder)) as update:
            measured = measure(model, ids, numbers, update)
        keep(output, record, str(folder), about | measured)
    print_table(*table(record))
    if output is not None:
        write_text(output.with_suffix(".md"), markdown(record))


def _check_table(output: Path, file: Path) -> None:
    """Raise a ``ValueError`` unless the table's file, beside the record, may be written."""
    table = output.with_suffix(".md")
    if table == output:
        raise ValueError(f"--output must be a JSON file, got {output}: {table} is for the table")
    if table.resolve() == file.resolve() or (table.exists() and not output.exists()):
        raise ValueError(f"--output must leave {table} free for its table, got {output}")
