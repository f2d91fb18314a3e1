"""Perplexity of a long text at several lengths, each model in one pass and bounded memory."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ovq.models.cache import CACHE_FIELD
from ovq.report import markdown_table
from ovq.run_config import environment
from ovq.runs import command_line, finite, read_json, write_text

FORMAT, VERSION = "ovq-perplexity", 1
PIECE = 2048  # tokens of one call of the model
BLOCK = 256  # tokens whose mean loss is kept, for the spread of a difference

# Called with tokens read and those in all.
Progress = Callable[[int, int], None]


@torch.no_grad()
def token_losses(
    model: Any, ids: Int[Tensor, " T"], progress: Progress | None = None
) -> Float[Tensor, " L"]:
    """The negative log-likelihood in nats of every token but the first, ``L = T - 1``."""
    found, cache = [], None
    for start in range(0, len(ids) - 1, PIECE):
        inputs = ids[start : start + PIECE].to(model.device)
        output = model(input_ids=inputs[None], use_cache=True, **{CACHE_FIELD: cache})
        cache = getattr(output, CACHE_FIELD)
        targets = ids[start + 1 : start + 1 + PIECE].to(model.device)
        logits = output.logits[0, : len(targets)].float()
        found.append(cross_entropy(logits, targets, reduction="none").cpu())
        if progress is not None:
            progress(start + len(inputs), len(ids))
    return torch.cat(found)


def measure(
    model: Any,
    ids: Int[Tensor, " T"],
    lengths: Sequence[int],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What is known of a model on a text.

    Args:
        model: of ours, in evaluation mode.
        ids: tokens of the text, as many as the longest length.
        lengths: tokens from the start of the text, rising.
        progress: called after every piece.

    Returns:
        By length, as text: ``nll``, the mean loss of all tokens but the first in nats, and
        ``state_bytes`` after them; ``nll_of_blocks``, the means of :data:`BLOCK` tokens each; the
        ``layers``; and ``seconds``.

    Raises:
        ValueError: lengths that are not rising from 2 on, or fewer tokens than the longest.
    """
    check_lengths(lengths)
    if len(ids) < lengths[-1]:
        raise ValueError(f"text must have at least {lengths[-1]:,} tokens, got {len(ids):,}")
    begun = time.perf_counter()
    losses = token_losses(model, ids[: lengths[-1]], progress).double()
    blocks = [block.mean().item() for block in losses.split(BLOCK)]
    return {
        "nll": {str(length): losses[: length - 1].mean().item() for length in lengths},
        "state_bytes": {str(length): model.state_size(length) for length in lengths},
        "nll_of_blocks": [round(value, 6) for value in blocks],
        "layers": model.config.mixer_names,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise a ``ValueError`` unless lengths rise from 2 on."""
    if not lengths or lengths[0] < 2 or sorted(set(lengths)) != list(lengths):
        raise ValueError(f"lengths must rise from 2 or more, got {list(lengths)}")


def read_record(path: Path | None, name: str, text: str, lengths: Sequence[int]) -> dict[str, Any]:
    """What a file holds so far of a text at these lengths; a new record if there is none.

    Args:
        path: of the file; ``None`` for a record that is not kept.
        name: of the text.
        text: all of it.
        lengths: tokens from its start.

    Raises:
        ValueError: another file, or one of another text or other lengths.
    """
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    about = {"text": name, "sha256": sha256, "lengths": list(lengths)}
    if path is None or not path.exists():
        command = command_line()
        new = {"format": FORMAT, "version": VERSION, "command": command}
        return {**new, **about, **environment(), "models": {}}
    record = read_json(path, "--output", FORMAT, VERSION, {"models": dict})
    for part, value in about.items():
        if record.get(part) != value:
            raise ValueError(
                f"--output must be of the same text and lengths, got {path} with {part} "
                f"{record.get(part)!r}, not {value!r}"
            )
    for name, model in record["models"].items():
        if not _is_measured(model, lengths):
            raise ValueError(
                f"--output must be a whole {path.name}, got {path} with damaged {name}"
            )
    return record


def _is_measured(model: Any, lengths: Sequence[int]) -> bool:
    """Whether the entry of a model is as it is written."""
    if not isinstance(model, dict):
        return False
    wanted = {str(length) for length in lengths}
    by_length = [x for x in (model.get("nll"), model.get("state_bytes")) if isinstance(x, dict)]
    blocks = model.get("nll_of_blocks")
    if len(by_length) < 2 or not isinstance(blocks, list):
        return False
    numbers = [*blocks, *(x.get(length, "") for x in by_length for length in wanted)]
    whole = len(blocks) == -(-(lengths[-1] - 1) // BLOCK)
    return whole and all(isinstance(x, int | float | None) for x in numbers)


def check_tokens(record: dict[str, Any], name: str, ids: Int[Tensor, " T"]) -> None:
    """Raise a ``ValueError`` unless a model reads the same tokens as those measured before.

    Means over other tokens are not comparable. The first model's are kept in the record.
    """
    tokens = ids[: record["lengths"][-1]].tolist()
    found = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    if record.setdefault("tokens", found) != found:
        raise ValueError(f"RUN must read the text as the tokens that others read, got {name}")


def keep(path: Path | None, record: dict[str, Any], name: str, measured: dict[str, Any]) -> None:
    """Add what was measured of a model, and write the file if there is one."""
    record["models"][name] = measured
    if path is not None:
        write_text(path, json.dumps(finite(record), indent=1, allow_nan=False) + "\n")


def table(record: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: perplexity at each length, and how far each model is from the first.

    The distance is in thousandths of a nat a token at the longest length, with the standard error
    over blocks.
    """
    lengths = [str(length) for length in record["lengths"]]
    columns = (
        "model", *(f"state at {int(t):,}" for t in lengths),
        *(f"perplexity at {int(t):,}" for t in lengths),
        *(f"millinats a token above the first, to {int(t):,}" for t in lengths),
    )  # fmt: skip
    rows, first = [], None
    for name, model in record["models"].items():
        first = first or model
        rows.append((
            name, *(f"{model['state_bytes'][t]:,}" for t in lengths),
            *(f"{perplexity_of(model['nll'][t]):.2f}" for t in lengths),
            *(_above(model, first, int(t)) for t in lengths),
        ))  # fmt: skip
    return columns, rows


def perplexity_of(nll: float | None) -> float:
    """That of a mean loss in nats; files hold ``None`` for one that is no number."""
    return math.nan if nll is None else math.exp(nll) if nll < 700 else math.inf


def _above(model: dict[str, Any], first: dict[str, Any], length: int) -> str:
    """The mean difference in thousandths of a nat, and its standard error over whole blocks."""
    number = (length - 1) // BLOCK
    if model is first:
        return "-"
    blocks = _values(model["nll_of_blocks"]) - _values(first["nll_of_blocks"])
    mean = _values([model["nll"][str(length)]]) - _values([first["nll"][str(length)]])
    if number < 2:
        return f"{1e3 * mean.item():.1f}"
    error = blocks[:number].std() / number**0.5
    return f"{1e3 * mean.item():.1f} ± {1e3 * error.item():.1f}"


def _values(kept: list[int | float | None]) -> Float[Tensor, " X"]:
    return torch.tensor([math.nan if x is None else x for x in kept], dtype=torch.float64)


def markdown(record: dict[str, Any]) -> str:
    """The table in Markdown."""
    return markdown_table(*table(record))
