"""A finished run as a model in memory, whole and as it was written, and what reads its texts."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

try:
    from safetensors import SafetensorError
    from transformers import AutoTokenizer
except ImportError as error:
    raise ImportError(
        f"ovq.loading needs {error.name or error}: pip install 'ovq[models]'"
    ) from error

from ovq.models import OVQForCausalLM, OVQForRegression
from ovq.models.configuration_ovq import OWN_FIELDS, dictionary_config
from ovq.run_config import RunConfig, model_class, model_config
from ovq.runs import MODEL_FOLDER, check_data, check_weights, damage_refused, read_run
from ovq.tasks import Task, token_task


@runtime_checkable
class Codec(Protocol):
    """What turns text into token ids and back: a task, or the tokenizer of a pretrained model."""

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The token ids of a text."""
        ...

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The text of token ids."""
        ...


def save_model(model: Any, tokenizer: Any | None, folder: Path) -> None:
    """Write a model, and its tokenizer if it has one, beside the folder first, then onto it.

    Raises:
        OSError: the files cannot be written.
    """
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        model.save_pretrained(beside)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    if tokenizer is not None:
        tokenizer.save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


class TokenizerCodec:
    """A tokenizer of transformers.

    ``encode`` and ``decode`` put no marks around a text, of which it may be a part;
    :func:`at_start` puts the one before a text that the tokenizer would.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> "TokenizerCodec":
        """The tokenizer in a model's folder.

        Raises:
            ValueError: none there.
        """
        with damage_refused(f"RUN must hold a tokenizer, got {folder}"):
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))

    def encode(self, text: str) -> Int64[Tensor, " T"]:
        """The ids ``[T]`` of a text."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Int64[Tensor, " T"] | Sequence[int]) -> str:
        """The text of ids ``[T]``."""
        return self.tokenizer.decode(torch.as_tensor(ids).tolist())


def at_start(codec: Codec, ids: Int64[Tensor, " T"]) -> Int64[Tensor, " U"]:
    """The ids of a text's beginning, after the mark that pretraining put before texts.

    Args:
        codec: what made the ids.
        ids: ``[T]``.

    Returns:
        ``[T + 1]`` if the codec is a tokenizer that begins with ``bos_token``, else the ids.
    """
    if not isinstance(codec, TokenizerCodec):
        return ids
    mark = codec.tokenizer.bos_token_id
    marks = codec.tokenizer("", verbose=False).input_ids[:1]
    return torch.cat([torch.tensor(marks, dtype=ids.dtype), ids]) if marks == [mark] else ids


def first_tokens(codec: Codec, text: str, length: int) -> Int64[Tensor, " T"]:
    """The tokens of a text's start, at least ``length`` of them if the text has so many.

    The mark that the tokenizer puts before texts is the first of them.
    """
    start = text[: 16 * length]  # enough but for odd texts
    ids = at_start(codec, codec.encode(start))
    if len(ids) >= length or len(start) == len(text):
        return ids
    return at_start(codec, codec.encode(text))


def load_run(folder: Path) -> tuple[RunConfig, OVQForCausalLM | OVQForRegression]:
    """The configuration and the model of a run that was trained on a task, ready to evaluate.

    Raises:
        ValueError: no run, one that is not done, one whose model is damaged or another's, one that
            was trained on a text that has changed since, or one without a task.
    """
    run = read_run(folder)
    if "task" not in run["config"]:
        raise ValueError(f"RUN must have been trained by `ovq train`, got the converted {folder}")
    config = RunConfig.from_dict(run["config"])
    whole = model_config(config.task, config.model)
    names = (
        config.model.keys() | {"dtype"} | (OWN_FIELDS - {"use_cache"})
    )  # which says how to call it
    whole.dtype = torch.float32  # as models are trained and written
    fields = {name: getattr(whole, name) for name in names}
    model = _load_model(folder, run, fields, model_class(config.task))
    _check_text(run, config.task)
    return config, model


def load_text_model(folder: Path) -> tuple[OVQForCausalLM, Codec]:
    """The model of a run, trained or converted, and what reads its texts.

    Raises:
        ValueError: as :func:`load_run`, but for the task.
    """
    run = read_run(folder)
    if "task" in run["config"]:
        config, model = load_run(folder)
        if not isinstance(model, OVQForCausalLM):
            raise ValueError(f"RUN must be of a model of tokens, got {folder} of one of numbers")
        return model, token_task(config.task)
    model = _load_model(folder, run, run["config"].get("model", {}))
    return model, TokenizerCodec.load(folder / MODEL_FOLDER)


def _load_model(
    folder: Path, run: dict[str, Any], fields: dict[str, Any], cls: Any = OVQForCausalLM
) -> Any:
    """The model, once it is sure that it is the run's."""
    if run["status"] != "done":
        raise ValueError(f"RUN must be done, got {folder} with status {run['status']!r}")
    place = folder / MODEL_FOLDER
    with damage_refused(f"RUN must hold a whole model, got {place}"):
        config = cls.config_class.from_pretrained(place, local_files_only=True)
    for name, value in fields.items():
        held = getattr(config, name, None)
        if not _same(name, value, held):
            raise ValueError(
                f"RUN must hold the model of its own configuration, got {folder} with {name} = "
                f"{held!r}, not {value!r}"
            )
    with damage_refused(f"RUN must hold a whole model, got {place}"):
        model, found = cls.from_pretrained(
            place, config=config, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(kind):
            raise ValueError(
                f"RUN must hold a whole model, got {place} with "
                f"{kind.replace('_', ' ')} {sorted(map(str, found[kind]))[:3]}"
            )
    check_weights(folder, run)
    return model.eval()


def _same(name: str, value: Any, held: Any) -> bool:
    """Whether a field of a run and that of its model are equal; those not given have defaults."""
    if name == "dictionary":
        return dictionary_config(value) == dictionary_config(held)
    part = isinstance(value, dict) and isinstance(held, dict) and value.items() <= held.items()
    return part or value == held


def _check_text(run: dict[str, Any], task: Task) -> None:
    try:
        found = task.fingerprint()
    except (ValueError, ImportError):
        return  # a prompt may do without it; what does not says so
    check_data(run, found)
