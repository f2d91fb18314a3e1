"""One self-contained page that shows what a trained model's dictionaries learn from a text.

Every OVQ layer is run again on the hidden states it gets in the model, a chunk at a time: which
slot each token joins, and with which weights it reads the slots. The page needs no network, and
forbids itself one.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

import ovq
from ovq.layers import OVQAttention
from ovq.layers.scalable_softmax import ssmax_scale
from ovq.loading import Codec
from ovq.models import OVQForCausalLM
from ovq.ops.ovq_attention import (
    OVQState,
    diagnose,
    num_active_by_chunk,
    ovq_attention,
    quantization_error,
    read_weights,
)
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.runs import write_text

MAX_TOKENS = 2048
SLOTS_KEPT = 8  # of those that a token reads
# Per token and query head: the slots kept with their weights, and one for what is left. A cell is
# at most ten characters, so a page stays near 3 MB.
MAX_CELLS = 300_000
PAGE = Path(__file__).with_name("inspection_page.html")

# Called after every chunk of every layer with those done and those in all.
Progress = Callable[[int, int], None]


class ChunkRead(NamedTuple):
    """One chunk of one sequence in one layer.

    Attributes:
        on_slots: ``[c, H, N]`` the weights of its tokens on the dictionary before it.
        on_exact: ``[c, H, L + c]`` those on the tail before it and on its own tokens.
        before: the state before the chunk.
        after: the state after it.
    """

    on_slots: Float[Tensor, "c H N"]
    on_exact: Float[Tensor, "c H E"]
    before: OVQState
    after: OVQState


def read_by_chunk(
    layer: OVQAttention,
    q: Float[Tensor, "1 T H K"],
    k: Float[Tensor, "1 T G K"],
    v: Float[Tensor, "1 T G V"],
) -> Iterator[ChunkRead]:
    """What a layer reads and learns from a sequence, from its start, chunk by chunk."""
    C, state = layer.dictionary.chunk_size, layer.empty_memory(1, q.device)
    for start in range(0, q.shape[1], C):
        queries, keys, values = (x[:, start : start + C] for x in (q, k, v))
        weights = read_weights(queries, keys, layer.beta, state)
        before = state
        _, state = ovq_attention(
            queries, keys, values, layer.beta, before, dictionary=layer.dictionary, impl="torch"
        )
        yield ChunkRead(weights.dictionary[0], weights.exact[0], before, state)


def layer_inputs(
    model: OVQForCausalLM, ids: Int[Tensor, " T"], mixers: dict[int, OVQAttention]
) -> dict[int, Float[Tensor, "1 T D"]]:
    """The hidden states that some mixers of a model get, by the index of their layer."""
    found: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: tuple) -> None:
            found[index] = arguments[0]

        return hook

    hooks = [mixer.register_forward_pre_hook(keep(index)) for index, mixer in mixers.items()]
    try:
        model.model(ids[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def ovq_mixers(model: OVQForCausalLM, layer: int | None = None) -> dict[int, OVQAttention]:
    """The OVQ mixers of a model by the index of their layer, or only the one asked for.

    Raises:
        ValueError: a model without OVQ layers, or an index that is none of theirs.
    """
    each = [block.mixer for block in model.model.layers]
    mixers = {i: mixer for i, mixer in enumerate(each) if isinstance(mixer, OVQAttention)}
    if not mixers:
        raise ValueError(
            f"RUN must hold a model with OVQ layers, got one with the mixers "
            f"{', '.join(sorted(set(model.config.mixer_names)))}"
        )
    if layer is not None and layer not in mixers:
        raise ValueError(
            f"layer must be an OVQ layer of the model, {', '.join(map(str, mixers))}, got {layer}"
        )
    return mixers if layer is None else {layer: mixers[layer]}


def token_texts(codec: Codec, ids: list[int]) -> list[str | None]:
    """The text of each token; ``None`` where a later one completes the character."""
    texts: list[str | None] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(number)
        text = codec.decode(waiting)
        if "\ufffd" not in text:
            texts += [None] * (len(waiting) - 1) + [text]
            waiting = []
        elif len(waiting) == 4:  # the longest character of UTF-8
            texts.append(codec.decode(waiting[:1]))
            del waiting[0]
    return texts + [codec.decode([number]) for number in waiting]


@torch.no_grad()
def inspect(
    model: OVQForCausalLM,
    codec: Codec,
    text: str,
    *,
    name: str,
    source: str,
    max_tokens: int = MAX_TOKENS,
    layer: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """What the OVQ layers of a model do with a text, as plain values: the content of the page.

    Args:
        model: in evaluation mode.
        codec: the task it was trained on, or its tokenizer, which encodes the text.
        text: at least one token.
        name: of the run.
        source: where the text is from.
        max_tokens: so many tokens from its start; fewer for models with very many heads.
        layer: the index of one OVQ layer; all of them when ``None``.
        progress: called after every chunk.

    Raises:
        ValueError: as :func:`ovq_mixers`; a text without tokens, or with something that the
            vocabulary lacks.
    """
    mixers = ovq_mixers(model, layer)
    ids = codec.encode(text)
    if not len(ids):
        raise ValueError(f"text must hold at least one token, got none in {source}")
    heads = model.config.num_attention_heads * len(mixers)
    kept = ids[: max(1, min(max_tokens, MAX_CELLS // (2 * heads)))]
    num_slots = max(1, min(SLOTS_KEPT, MAX_CELLS // (len(kept) * heads) - 1))
    inputs = layer_inputs(model, kept, mixers)
    chunks = -(-len(kept) // model.config.dictionary["chunk_size"])
    found = []
    for done, (index, mixer) in enumerate(mixers.items()):

        def advance(chunk: int, before: int = done * chunks) -> None:
            if progress is not None:
                progress(before + chunk, len(mixers) * chunks)

        found.append({"layer": index} | _layer_content(mixer, inputs[index], num_slots, advance))
    texts = token_texts(codec, kept.tolist())
    return {
        "format": "ovq-inspection",
        "version": 1,
        "ovq": ovq.__version__,
        "run": name,
        "source": source,
        "tokens": texts,
        "spaced": len(texts) > 1 and " ".join(t or "" for t in texts) == codec.decode(kept),
        "num_tokens_of_text": len(ids),
        "slots_kept": num_slots,
        "dictionary": model.config.dictionary,
        "layers": found,
    }


def _layer_content(
    mixer: OVQAttention,
    hidden_states: Float[Tensor, "1 T D"],
    num_slots: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    q, k, v, _ = mixer.queries_keys_values(hidden_states)
    active, top_slots, top_weights, on_dictionary = [], [], [], []
    state = mixer.empty_memory(1, q.device)
    for done, read in enumerate(read_by_chunk(mixer, q, k, v), start=1):
        top = read.on_slots.topk(min(num_slots, read.on_slots.shape[-1]), dim=-1)
        top_slots.append(top.indices)
        top_weights.append(_thousandths(top.values))
        on_dictionary.append(_thousandths(read.on_slots.sum(-1)))
        state = read.after
        active.append(int(diagnose(state).num_active))
        advance(done)
    _, _, slots = ovq_attention_with_slots(
        q, k, v, mixer.beta, dictionary=mixer.dictionary, impl="torch"
    )
    joined, T = slots.tokens[0], q.shape[1]
    reads = {
        "top_slots": torch.cat(top_slots),
        "top_weights": torch.cat(top_weights),
        "on_dictionary": torch.cat(on_dictionary),
    }
    schedule = num_active_by_chunk(mixer.dictionary, T).tolist()
    return {
        "active": active[: len(schedule)],
        "schedule": schedule,
        "state_bytes": mixer.state_size(T),
        "heads": _heads(mixer, reads, joined, _figures(state, k, v, joined)),
    }


def _thousandths(weights: Tensor) -> Tensor:
    return (weights * 1000).round().int()


def _heads(
    mixer: OVQAttention,
    reads: dict[str, Int[Tensor, "T H *slots"]],
    slots: Int[Tensor, "T G"],
    figures: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One entry a key-value head, with the reads of its query heads in it."""
    group, beta = mixer.num_heads // mixer.num_kv_heads, mixer.beta
    length = mixer.ssmax_length
    if length is not None:  # as for the last query
        beta = beta * ssmax_scale(torch.tensor(float(len(slots))), length)
    heads = []
    for head in range(mixer.num_kv_heads):
        queries = [
            {"query_head": h, "beta": round(beta[h].item(), 3), "is_scaled": length is not None}
            | {name: read[:, h].flatten().tolist() for name, read in reads.items()}
            for h in range(head * group, (head + 1) * group)
        ]
        heads.append(
            {"slots": slots[:, head].tolist(), "figures": figures[head], "queries": queries}
        )
    return heads


def _figures(
    state: OVQState, k: Tensor, v: Tensor, slots: Int[Tensor, "T G"]
) -> list[dict[str, Any]]:
    """The diagnostics of each key-value head, ``None`` where there is no number."""
    found, error = diagnose(state), quantization_error(state, k, v, slots[None])
    ages = found.slot_ages[0, : int(found.num_active)].tolist()

    def number(figure: Tensor, head: int) -> float | None:
        value = float(figure[0, head])
        return round(value, 6) if math.isfinite(value) else None

    return [
        {
            "num_active": int(found.num_active),
            "perplexity": number(found.perplexity, head),
            "oldest": max(ages, default=None),
            "youngest": min(ages, default=None),
            "unit_key_error": number(found.unit_key_error, head),
        }
        | {f"error_of_{name}": number(figure, head) for name, figure in asdict(error).items()}
        for head in range(slots.shape[1])
    ]


def render(content: dict[str, Any]) -> str:
    """The page of what :func:`inspect` found: one HTML document with everything in it.

    Its policy lets the one script in it run and forbids every request.
    """
    page = PAGE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # No text of the user's can end the element that holds the data.
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("SCRIPT-HASH", f"sha256-{digest}", 1).replace("CONTENT", data, 1)


def write_page(content: dict[str, Any], path: Path) -> int:
    """Write the page beside its place, rename it onto it, and return its size in bytes."""
    page = render(content)
    write_text(path, page)
    return len(page.encode())
