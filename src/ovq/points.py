"""What is measured of a trained run: a task at a length, and so many slots of the dictionary."""

import json
import math
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ovq.layers.registry import WITH_DICTIONARY
from ovq.models import OVQConfig, OVQModel
from ovq.tasks import Task, task_from_dict, task_to_dict

KEPT = "kept"  # of settings: slots stay as their first chunk left them


@dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to measure of a trained run.

    Attributes:
        length: of the context.
        setting: slots of the dictionary, as :func:`dictionary_of` reads them; ``None`` for the
            trained number.
        num_sequences: to measure on.
        changes: other fields of the task that differ from training, by name.
    """

    length: int
    setting: str | None = None
    num_sequences: int = 64
    changes: Mapping[str, Any] = field(default_factory=dict)

    def task_of(self, trained: Task) -> Task:
        """What the model is asked.

        Raises:
            ValueError: changes that the task cannot have.
        """
        task = trained.without_curriculum()
        if not self.changes:
            return task.with_length(self.length)
        fields = task_to_dict(task) | {"context_length": self.length}
        return task_from_dict(fields | dict(self.changes))


def num_centroids_at(setting: str, length: int) -> int:
    """The number that a setting such as ``64`` or ``T/4`` means at a context of ``length`` tokens.

    Raises:
        ValueError: the setting is neither form.

    >>> num_centroids_at("T/4", 128), num_centroids_at("64", 128)
    (32, 64)
    """
    match = re.fullmatch(r"(T/)?([1-9][0-9]*)", setting)
    if match is None:
        raise ValueError(
            f"num_centroids must be a number or a fraction of the context such as T/4 or of full "
            f"attention's bytes such as 25%, and after colons such a size of chunks and {KEPT}, "
            f"got {setting!r}"
        )
    number = int(match[2])
    return max(1, length // number) if match[1] else number


def num_centroids_within(percent: float, config: OVQConfig, num_tokens: int) -> int:
    """The most slots with which a model's whole state holds that share of full attention's.

    Both states are of the whole model, sliding windows and all, after ``num_tokens`` tokens; the
    other model has full attention wherever this one has a dictionary. So the share of the layers
    with the dictionary alone is a little less.

    Args:
        percent: of full attention's bytes, in (0, 100].
        config: of a model with a dictionary.
        num_tokens: of the sequence, its questions too.

    Returns:
        The number of slots, 0 if windows and chunks alone take more.

    Raises:
        ValueError: ``percent`` out of its range.

    >>> model = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 2}
    >>> dictionary = {"num_centroids": 64, "chunk_size": 16}
    >>> config = OVQConfig(window_size=16, dictionary=dictionary, **model)
    >>> num_centroids_within(25.0, config, 1024), num_centroids_within(5.0, config, 128)
    (225, 0)
    """
    if not 0.0 < percent <= 100.0:
        raise ValueError(f"num_centroids must be a share in (0%, 100%], got {percent:g}%")

    full = ["full_attention" if x in WITH_DICTIONARY else x for x in config.layer_pattern]
    of_full = state_bytes(config, num_tokens, layer_pattern=full, use_short_conv=False)
    return num_centroids_holding(percent / 100 * of_full, config, num_tokens)


def num_centroids_holding(num_bytes: float, config: OVQConfig, num_tokens: int) -> int:
    """The most slots with which a model's whole state has at most so many bytes; 0 if none has."""
    one, two = (
        state_bytes(config, num_tokens, dictionary=config.dictionary | {"num_centroids": n})
        for n in (1, 2)
    )
    return max(0, 1 + math.floor((num_bytes - one) / (two - one)))


def state_bytes(config: OVQConfig, num_tokens: int, **fields: Any) -> int:
    """Bytes that one row's state has after so many tokens, with some fields of the model changed.

    >>> state_bytes(OVQConfig(num_hidden_layers=1, layer_pattern=["full_attention"]), 1000)
    4096008
    """
    changed = json.dumps(config.to_dict() | fields, sort_keys=True)
    return _on_meta(type(config), changed).state_size(num_tokens)


@lru_cache(maxsize=64)
def _on_meta(cls: type[OVQConfig], fields: str) -> OVQModel:
    """A model of a configuration written as JSON: shapes without memory."""
    config = cls.from_dict(json.loads(fields))
    dtype: Any = config.dtype or torch.float32
    with torch.device("meta"):
        return OVQModel(config).to(dtype)


def dictionary_of(setting: str, config: OVQConfig, task: Task) -> dict[str, Any]:
    """The fields of the dictionary that a setting means for a model and a task.

    Args:
        setting: a number of slots; a fraction of the context such as ``T/4``; or, such as ``25%``,
            a share of the bytes that full attention's state has at the end of the sequence, see
            :func:`num_centroids_within`. After a colon, as in ``25%:T/128``, the tokens of a chunk,
            in either of the first two forms; the trained number if that is more. With ``:kept`` in
            the end every slot stays as its first chunk left it: what joins later is counted alone.
        config: of a model with a dictionary.
        task: with the context and the questions of the sequence.

    Returns:
        ``num_centroids``; ``chunk_size`` where it differs from the trained one; ``rate`` and
        ``step`` if slots are kept.

    Raises:
        ValueError: none of these forms, or a share that leaves no slot.
    """
    number = _num_centroids(setting, config, task)
    if number < 1:
        raise ValueError(
            f"num_centroids must be a share of full attention's state of which windows and chunks "
            f"leave one slot at least, got {setting} at a context of {task.context_length} tokens"
        )
    kept = {"rate": "constant", "step": 0.0} if _parts(setting)[2] else {}
    return {"num_centroids": number} | _chunk(setting, config, task) | kept


def _parts(setting: str) -> tuple[str, str | None, bool]:
    """Slots, chunk and whether slots are kept."""
    slots, *others = setting.split(":")
    is_kept = others[-1:] == [KEPT]
    chunk = ":".join(others[: len(others) - is_kept])
    return slots, chunk if len(others) > is_kept else None, is_kept


def leaves_a_slot(setting: str, config: OVQConfig, task: Task) -> bool:
    """Whether a setting is no share of full attention's bytes, or one that has room for a slot."""
    return _num_centroids(setting, config, task) >= 1


def _num_centroids(setting: str, config: OVQConfig, task: Task) -> int:
    slots = _parts(setting)[0]
    share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", slots)
    if share is None:
        return num_centroids_at(slots, task.context_length)
    chunked = copy(config)
    chunked.dictionary = config.dictionary | _chunk(setting, config, task)
    return num_centroids_within(float(share[1]), chunked, task.sequence_length)


def _chunk(setting: str, config: OVQConfig, task: Task) -> dict[str, int]:
    """The chunk's size, if the setting makes it larger."""
    chunk = _parts(setting)[1]
    size = 0 if chunk is None else num_centroids_at(chunk, task.context_length)
    return {"chunk_size": size} if size > config.dictionary["chunk_size"] else {}
