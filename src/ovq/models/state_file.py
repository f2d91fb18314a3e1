"""Which model a state on disk belongs to, and what else is known of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from textwrap import shorten
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ovq.layers import MixerState
from ovq.models.configuration_ovq import OVQConfig
from ovq.ops.state_file import StateFile, add_tensors, state_classes

# Fields of the configuration that change no state.
_NOT_IN_A_STATE = {
    "keys_to_ignore_at_inference", "max_position_embeddings", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "straight_through",
    "initial_beta", "initial_decay_rate", "num_identity_layers",
}  # fmt: skip
_SHORT = 12  # digits of a digest in a message


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a state depends on beside the tokens; of another model, it means nothing.

    Attributes:
        configuration: the fields of the configuration that the mathematics depend on, by name.
        weights: SHA-256 of all weights and buffers by name, in their dtype.
    """

    configuration: dict[str, Any]
    weights: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Fingerprint":
        """That of a model as it is now; it takes as long as reading its weights, once."""
        sha = hashlib.sha256()
        add_tensors(sha, model.state_dict())
        return cls(configuration=_fields(model.config), weights=sha.hexdigest())

    def difference(self, other: Any) -> str | None:
        """What another fingerprint, as a file has it, has first in place of this one's.

        Fields of a later version have their defaults, as where an older ``config.json`` is read.
        """
        try:
            written = other["configuration"]
            known = {x: written[x] for x in written if x in OVQConfig.__annotations__}
            completed = {**written, **_fields(OVQConfig(**known))}
        except (TypeError, KeyError, ValueError):
            return "no fingerprint of a model"
        ours, theirs = _flat(self.configuration), _flat(completed)
        for name in sorted(ours.keys() | theirs.keys()):
            mine, found = ours.get(name, "none"), theirs.get(name, "none")
            if mine != found:
                return f"{name} = {found!r}, not {mine!r}"
        if other.get("weights") != self.weights:
            found = str(other.get("weights"))
            return f"weights {found[:_SHORT]}, not {self.weights[:_SHORT]}"
        return None


def save_states(
    path: str | PathLike,
    states: Sequence[MixerState],
    *,
    fingerprint: Fingerprint,
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the states of all layers.

    Args:
        path: of the file; it is written beside, then renamed.
        states: one a layer.
        fingerprint: of the model that made them.
        about: what else is known, as JSON has it.
        tensors: what else goes with them, by name.

    Raises:
        ValueError, ImportError, OSError: as :meth:`ovq.ops.state_file.StateFile.save`; no states.
    """
    if not states:
        raise ValueError("cache must hold the state of every layer, got one before any token")
    known = {
        "model": {"configuration": fingerprint.configuration, "weights": fingerprint.weights},
        "num_tokens": states[0].num_tokens.tolist(),
    }
    StateFile(states=tuple(states), about={**known, **about}, tensors=tensors or {}).save(path)


def load_states(path: str | PathLike, *, model: PreTrainedModel) -> StateFile:
    """Read what :func:`save_states` wrote, its states on the device of the model.

    Args:
        path: of the file.
        model: the one that made the states.

    Raises:
        ValueError, ImportError, OSError: as :meth:`ovq.ops.state_file.StateFile.load`; a state of
            another model.
    """
    decoder: Any = model.base_model
    wanted = [layer.mixer.init_state(1) for layer in decoder.layers]

    def check(about: dict[str, Any]) -> None:
        if "model" not in about:
            raise ValueError(
                f"path must hold the state of a model, got that of an operator: {path}"
            )
        difference = Fingerprint.of(model).difference(about["model"])
        if difference is not None:
            raise ValueError(
                f"path must hold a state of this model, got {path} made with "
                f"{shorten(difference, 200, placeholder=' ...')}"
            )

    file = StateFile.load(path, set().union(*map(state_classes, wanted)), check)
    if [type(state) for state in file.states] != [type(state) for state in wanted]:
        raise ValueError(
            f"path must hold one state a layer, {len(wanted)} here, got {len(file.states)} or "
            f"others in {path}"
        )
    device = model.device
    return StateFile(
        states=tuple(state.to(device) for state in file.states),
        about=file.about,
        tensors={name: tensor.to(device) for name, tensor in file.tensors.items()},
    )


def _fields(config: Any) -> dict[str, Any]:
    """The fields that a state depends on, as they come back from a file."""
    names = [name for name in OVQConfig.__annotations__ if name not in _NOT_IN_A_STATE]
    return json.loads(json.dumps({name: getattr(config, name) for name in names}))


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields within fields by names such as ``dictionary.num_centroids``."""
    flat = {}
    for name, value in fields.items():
        parts = _flat(value) if isinstance(value, dict) else None
        flat |= {name: value} if parts is None else {f"{name}.{k}": v for k, v in parts.items()}
    return flat
