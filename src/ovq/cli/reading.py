"""Commands that put a trained model to a text: generate, read, inspect."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from ovq.cli.shared import (
    INTERRUPTED,
    LONG,
    Run,
    Threads,
    app,
    console,
    one_line_errors,
    progress_bar,
    read_text,
    say,
    set_up,
)

PROMPT_SHOWN = 400  # tokens


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
    from ovq.evaluate import held_out_tokens
    from ovq.loading import at_start, load_run, load_text_model
    from ovq.reading import Reading

    set_up(threads)
    text = prompt if prompt_file is None else read_text("prompt_file", prompt_file)
    model, codec = load_text_model(run)
    reading = Reading() if state is None else Reading.load(state, model=model)
    if held_out is None:
        ids = codec.encode(text or "")
        ids = ids if reading.sources else at_start(codec, ids)
    else:
        ids = held_out_tokens(load_run(run)[0].task, held_out)
    with console.status(f"{len(ids):,} tokens of prompt, then {max_new_tokens:,} new ones"):
        new, before, after = continue_prompt(
            model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
            seed=seed, cache=reading.cache, next_logits=reading.next_logits,
        )  # fmt: skip
    if reading.sources:
        _print_part("what was read", ", then ".join(map(str, reading.sources)))
    if len(ids):
        name = "the end of the prompt" if len(ids) > PROMPT_SHOWN else "the prompt"
        _print_part(name, codec.decode(ids[-PROMPT_SHOWN:]))
    _print_part("the model goes on", codec.decode(new))
    console.rule()
    of = "in all" if reading.sources else "of the prompt"
    say(
        f"state: {before:,} bytes after the {reading.num_tokens + len(ids):,} tokens {of}, "
        f"{after:,} bytes after {len(new):,} more"
    )


def _print_part(name: str, text: str) -> None:
    console.rule(name, align="left")
    say(text)


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
    from ovq.runs import check_output_file, check_replaced, write_text

    for path in (output, record):
        if path is not None:
            check_output_file(path)
    if record is not None:
        check_replaced(record, '"num_parameters"', "--record must be a new file or such a record")
    set_up(threads)
    from ovq.loading import at_start, load_text_model
    from ovq.reading import ReadingInterruptedError, begin_reading, check_output, read_to_file
    from ovq.reading_report import record_of, summary

    check_output(output, state)
    output.parent.mkdir(parents=True, exist_ok=True)
    text = read_text("file", file)
    model, codec = load_text_model(run)
    with console.status(f"the tokens of {file.name}"):
        ids = codec.encode(text)
        ids = (ids if state is not None else at_start(codec, ids))[:max_tokens]
    begin = begin_reading(model, state, name=file.name, text=text, num_tokens=len(ids))
    begun = time.perf_counter()
    try:
        with progress_bar(f"reading {file.name}") as update:
            reading, num_new = read_to_file(model, ids, output, begin=begin, progress=update)
    except ReadingInterruptedError as interrupt:
        say(f"{interrupt}: the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.perf_counter() - begun
    found = record_of(
        model, reading, output, run=run.resolve().name, num_new=num_new, seconds=seconds
    )
    say(summary(found))
    if record is not None:
        write_text(record, json.dumps(found, indent=1) + "\n")


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
    from ovq.runs import check_output_file, check_replaced

    check_output_file(output)
    check_replaced(output, "<title>ovq inspect", "--output must be a new file or such a page")
    set_up(threads)
    from ovq.inspection import inspect as inspect_text
    from ovq.inspection import write_page
    from ovq.loading import load_text_model

    model, codec = load_text_model(run)
    written, begun = read_text("text", text), time.perf_counter()
    with progress_bar("reading") as update:

        def progress(done: int, total: int) -> None:
            if time.perf_counter() - begun > LONG:
                update(done, total)

        content = inspect_text(
            model, codec, written, name=run.resolve().name, source=text.name,
            max_tokens=max_tokens, layer=layer, progress=progress,
        )  # fmt: skip
    size = write_page(content, output)
    shown, given = len(content["tokens"]), content["num_tokens_of_text"]
    of = "" if shown == given else f" of {given:,}"
    say(
        f"written: {output}, {size:,} bytes, {shown:,}{of} tokens in layers "
        f"{', '.join(str(part['layer']) for part in content['layers'])}"
    )
