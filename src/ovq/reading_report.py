"""How large a state file is beside the KV cache of full attention, and how long reading took."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ovq.layers import build_mixer
from ovq.models import OVQForCausalLM
from ovq.reading import Reading
from ovq.run_config import environment
from ovq.runs import command_line

FULL_ATTENTION = "full_attention_nope"


def state_bytes_with(model: OVQForCausalLM, names: list[str], num_tokens: int) -> int:
    """Bytes of state after so many tokens if the layers of the model had the mixers so named."""
    with torch.device("meta"):
        mixers = [build_mixer(name, model.config, index) for index, name in enumerate(names)]
    return sum(mixer.to(model.dtype).state_size(num_tokens) for mixer in mixers)


def kv_cache_bytes(model: OVQForCausalLM, num_tokens: int) -> dict[str, int]:
    """Bytes of the KV cache of the same model with full attention, in its dtype.

    Returns:
        ``every_layer``, and ``beside_windows``: sliding-window layers stay as they are.
    """
    names = model.config.mixer_names
    kept = [name if name == "sliding_window" else FULL_ATTENTION for name in names]
    return {
        "every_layer": state_bytes_with(model, [FULL_ATTENTION] * len(names), num_tokens),
        "beside_windows": state_bytes_with(model, kept, num_tokens),
    }


def record_of(
    model: OVQForCausalLM, reading: Reading, file: Path, *, run: str, num_new: int, seconds: float
) -> dict[str, Any]:
    """What is known of a reading, for a run file.

    Args:
        model: the reader.
        reading: what it remembers.
        file: the state file.
        run: the name of the model's run.
        num_new: tokens that were read in this time.
        seconds: from the first of them to the file.
    """
    return {
        "command": command_line(),
        "run": run,
        "num_parameters": model.num_parameters(),
        "mixers": model.config.mixer_names,
        "dictionary": model.config.dictionary,
        "dtype": str(model.dtype).removeprefix("torch."),
        "sources": [asdict(source) for source in reading.sources],
        "num_tokens": reading.num_tokens,
        "num_new": num_new,
        "seconds": seconds,
        "state_bytes": reading.cache.num_bytes,
        "file_bytes": file.stat().st_size,
        "kv_cache_bytes": kv_cache_bytes(model, reading.num_tokens),
        **environment(),
    }


def summary(result: dict[str, Any]) -> str:
    """Three lines on a record."""
    file, cache = result["file_bytes"], result["kv_cache_bytes"]["every_layer"]
    new, seconds = result["num_new"], result["seconds"]
    done = f"{new:,} tokens read in {seconds:,.1f} s, {new / seconds:,.0f} tokens/s"
    return (
        f"{done if new else 'nothing to do, it was written before'}\n"
        f"state file: {file:,} bytes after {result['num_tokens']:,} tokens\n"
        f"KV cache of full attention: {cache:,} bytes, {times(cache, file)} times as many"
    )


def markdown(result: dict[str, Any]) -> str:
    """The table of a record: sizes, and each as a multiple of the file."""
    file, cache = result["file_bytes"], result["kv_cache_bytes"]
    rows = [
        ("the state file", file),
        ("the state in memory", result["state_bytes"]),
        ("KV cache, full attention beside the sliding windows", cache["beside_windows"]),
        ("KV cache, full attention in every layer", cache["every_layer"]),
    ]
    lines = [f"| after {result['num_tokens']:,} tokens | bytes | files |", "|---|---:|---:|"]
    for name, size in rows:
        lines.append(f"| {name} | {size:,} | {times(size, file)} |")
    return "\n".join(lines) + "\n"


def times(size: int, unit: int) -> str:
    """How many units a size is, to three digits or all before the point."""
    ratio = size / unit
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
