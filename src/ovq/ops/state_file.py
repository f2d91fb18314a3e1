"""States on disk: one safetensors file for the states of any mixers, checked when it is read.

A state is a frozen dataclass of tensors, plain values and further dataclasses. The tensors are
stored under the path of their fields, the rest as JSON in the file's metadata, with a digest of
everything. The reader says which classes it expects; no class is looked up by a name in the file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from os import replace as rename
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = "ovq-state"
FORMAT_VERSION = 3  # 3: the states of any mixers, and a digest
_NEEDS_SAFETENSORS = "saving and loading states needs safetensors: pip install 'ovq[models]'"
_STATE = "states.{}"  # how the tensors of one state begin
_OTHER = "tensors.{}"  # how one that belongs to none is called
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """What a state file holds.

    Attributes:
        states: in order, say one a layer.
        about: what else is known, as JSON has it.
        tensors: what belongs to no single state, by name.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from ovq.ops.attention import KVState
        >>> state = KVState.empty(1, 2, 8, 8)
        >>> with TemporaryDirectory() as folder:
        ...     StateFile(states=(state,)).save(f"{folder}/state")
        ...     file = StateFile.load(f"{folder}/state", [KVState])
        >>> file.states[0].keys.shape
        torch.Size([1, 0, 2, 8])
    """

    states: Sequence[Any]
    about: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, path: str | PathLike) -> None:
        """Write the file, beside ``path`` first, then renamed onto it.

        Raises:
            ValueError: ``path`` is a folder, or lies in none; a state that holds something else
                than tensors, plain values and dataclasses.
            ImportError: safetensors is not installed.
            OSError: the file cannot be written.
        """
        if not Path(path).parent.is_dir():
            raise ValueError(f"path must lie in an existing folder, got {path}")
        if Path(path).is_dir():
            raise ValueError(f"path must be a file, got the folder {path}")
        try:
            from safetensors import SafetensorError
            from safetensors.torch import save_file
        except ImportError as error:
            raise ImportError(_NEEDS_SAFETENSORS) from error

        held: dict[str, Tensor] = {_OTHER.format(name): x for name, x in self.tensors.items()}
        described = [_describe(s, _STATE.format(i), held) for i, s in enumerate(self.states)]
        tensors = _storable(held)
        metadata = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "states": _json(described),
            "about": _json(self.about),
        }
        metadata["digest"] = digest(tensors, metadata)
        beside = Path(f"{path}.partial")
        try:
            save_file(tensors, beside, metadata=metadata)
            rename(beside, path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        classes: Iterable[type],
        check: Callable[[dict[str, Any]], None] | None = None,
    ) -> "StateFile":
        """Read a file that :meth:`save` wrote, onto the CPU.

        Args:
            path: of the file.
            classes: those that the states may be made of.
            check: called with what else is known, once it is sure that it is as it was written,
                and before the states are made; it raises if they are not wanted.

        Raises:
            ValueError: the file is truncated, altered, of another kind, of another version, or
                holds states of other classes.
            ImportError: safetensors is not installed.
            OSError: there is no such file.
        """
        with _opened(path) as file:
            metadata = file.metadata() or {}
            _check_version(path, metadata)
            # Copies, at addresses like those of any tensor: some kernels round by alignment.
            tensors = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
        if metadata.get("digest") != digest(tensors, metadata):
            raise ValueError(f"path must be a state file as it was written, got the altered {path}")
        about = _about(path, metadata)
        if check is not None:
            check(about)
        known = {kind.__name__: kind for kind in classes}
        try:
            states = tuple(
                _rebuild(described, _STATE.format(i), tensors, known)
                for i, described in enumerate(json.loads(metadata["states"]))
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"path must hold whole states, got {path}: {error}") from None
        prefix = _OTHER.format("")
        strange = [name for name in tensors if not name.startswith(prefix)]
        if strange:
            raise ValueError(f"path must hold whole states, got {path} with {strange} beside them")
        others = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        return cls(states=states, about=about, tensors=others)


def is_state_file(path: str | PathLike) -> bool:
    """Whether a file is a state file of whatever version, by what it says of itself."""
    try:
        with _opened(path) as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except ValueError:
        return False


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of tensors on the CPU, by name, and of metadata but for its digest."""
    told = {name: text for name, text in metadata.items() if name != "digest"}
    sha = hashlib.sha256(_json(told).encode())
    add_tensors(sha, tensors)
    return sha.hexdigest()


def add_tensors(sha: Any, tensors: Mapping[str, Tensor]) -> None:
    """Let a hash of :mod:`hashlib` read tensors: names, dtypes, shapes and all bytes."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)


def state_classes(state: Any) -> set[type]:
    """The classes that a state is made of."""
    if not dataclasses.is_dataclass(state):
        return set()
    parts = (state_classes(getattr(state, part.name)) for part in dataclasses.fields(state))
    return {type(state)}.union(*parts)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _describe(value: Any, name: str, held: dict[str, Tensor]) -> dict[str, Any]:
    """What to write of a value; its tensors are added to those held, by name."""
    if isinstance(value, Tensor):
        held[name] = value
        return {"tensor": name}
    if dataclasses.is_dataclass(value):
        fields = {
            part.name: _describe(getattr(value, part.name), f"{name}.{part.name}", held)
            for part in dataclasses.fields(value)
        }
        return {"class": type(value).__name__, "fields": fields}
    if not isinstance(value, _PLAIN):
        raise ValueError(
            f"states must hold tensors, plain values and dataclasses of them, got "
            f"{type(value).__name__} in {name}"
        )
    return {"value": value}


def _rebuild(
    described: dict[str, Any], name: str, left: dict[str, Tensor], known: Mapping[str, type]
) -> Any:
    """The value that :func:`_describe` described; its tensors are taken from those left."""
    if "tensor" in described:
        return left.pop(described["tensor"])
    if "class" not in described:
        return described["value"]
    kind = known.get(described["class"])
    if kind is None:
        raise ValueError(f"{name} is no {' or '.join(sorted(known))} but a {described['class']}")
    parts = {
        part: _rebuild(value, f"{name}.{part}", left, known)
        for part, value in described["fields"].items()
    }
    return kind(**parts)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two of them in the same memory."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        stored[name] = tensor.detach().cpu().contiguous()
        place = stored[name].untyped_storage().data_ptr()
        if place in seen:
            stored[name] = stored[name].clone()
        seen.add(place)
    return stored


@contextmanager
def _opened(path: str | PathLike) -> Iterator[Any]:
    """A safetensors file; whatever is wrong with it, now or while it is read, is an error."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(_NEEDS_SAFETENSORS) from error

    if Path(path).is_dir():
        raise ValueError(f"path must be a file, got the folder {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"path must be a whole safetensors file, got {path}: {error}") from None


def _about(path: str | PathLike, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        about = json.loads(metadata.get("about", ""))
    except ValueError:
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"path must say what it is about, got {path} with {about!r}")
    return about


def _check_version(path: str | PathLike, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"path must be a state file, got {path}")
    version = metadata.get("version", "")
    if version == str(FORMAT_VERSION):
        return
    older = version.isdecimal() and int(version) < FORMAT_VERSION
    advice = "make it anew" if older else "update ovq"
    raise ValueError(
        f"path must be of format version {FORMAT_VERSION}, got version {version!r} in {path}: "
        f"{advice}"
    )
