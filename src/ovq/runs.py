"""Run folders: what a run wrote, read and written without loading anything heavy.

A run folder holds ``run.json`` (configuration, versions, progress, metrics), ``model/`` once
training is done (safetensors), and ``checkpoints/`` while it is not.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType, UnionType
from typing import Any

RUN_FORMAT = "ovq-run"
RUN_VERSION = 1
RUN_FILE = "run.json"
MODEL_FOLDER = "model"
LOCK_FILE = ".lock"  # held while a folder is written to; a killed process lets go of it
LARGEST = 1e300  # of numbers in files
MISSING = "nothing"


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to, renamed onto it afterwards.

    An interrupted write leaves the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    yield beside
    os.replace(beside, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file, or leave the old one."""
    with written_beside(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write the run file of a folder; numbers that JSON lacks, NaN and infinities, as null."""
    whole = finite({"format": RUN_FORMAT, "version": RUN_VERSION} | run)
    write_text(folder / RUN_FILE, json.dumps(whole, indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """A value with ``None`` in the place of numbers that JSON lacks, NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command_line() -> str | None:
    """The command that is running, for the files it writes; ``None`` if it is none of ours."""
    return " ".join(["ovq", *sys.argv[1:]]) if "ovq" in Path(sys.argv[0]).name else None


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """The digest of every file in a folder, by name."""
    return {path.name: digest(path) for path in sorted(folder.iterdir()) if path.is_file()}


def weights_digests(folder: Path) -> dict[str, str]:
    """Those of a run's trained weights alone."""
    if not (folder / MODEL_FOLDER).is_dir():
        return {}
    return {
        name: found
        for name, found in digests(folder / MODEL_FOLDER).items()
        if name.endswith(".safetensors")
    }


def check_weights(folder: Path, run: dict[str, Any]) -> None:
    """Raise a ``ValueError`` unless the folder holds the weights that its run file tells of."""
    told, found = run.get("weights"), weights_digests(folder)
    if told is not None and told != found:
        raise ValueError(
            f"RUN must hold the weights that it trained, got {folder / MODEL_FOLDER} with "
            f"{_short(found)}, not {_short(told)}"
        )


def _short(files: dict[str, str]) -> str:
    return ", ".join(f"{name} {sha[:12]}" for name, sha in files.items()) or "none"


def check_data(run: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Raise a ``ValueError`` unless the data is what the run began with.

    Args:
        run: a run file's content; ``data`` in it is what was found when the run began.
        found: bytes and digest of each file, as :meth:`ovq.tasks.Task.fingerprint` has them now.
    """
    told = run.get("data")
    if told is None or told == found:
        return
    changes = [f"{name} removed" for name in sorted(told.keys() - found.keys())]
    changes += [f"{name} added" for name in sorted(found.keys() - told.keys())]
    for name in sorted(told.keys() & found.keys()):
        before, now = told[name]["bytes"], found[name]["bytes"]
        if told[name] != found[name]:
            other = "other bytes" if before == now else f"{now:,} bytes, not {before:,}"
            changes.append(f"{name} with {other}")
    shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if changes[5:] else "")
    raise ValueError(f"source must hold what the run began with, got {shown}")


@contextmanager
def damage_refused(rule: str) -> Iterator[None]:
    """Whatever a library raises while it reads damaged files, as a ``ValueError`` of one line."""
    try:
        yield
    except ImportError:  # a package that is not installed is no damage
        raise
    except Exception as error:  # noqa: BLE001  depends on where the file is cut
        reason = shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
        raise ValueError(f"{rule}: {reason}") from None


def distinct_folders(folders: Iterable[Path]) -> list[Path]:
    """The folders in order, each once, however its path is written."""
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    return list(distinct.values())


def check_output_folder(path: Path) -> None:
    """Raise a ``ValueError`` unless files could be written into this folder, made or to be made."""
    at = path
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        raise ValueError(f"--output must be a folder, got {path}: {at} is a file")
    if not os.access(at, os.W_OK | os.X_OK):
        raise ValueError(f"--output must be a folder that can be written to, got {path}")


def check_output_file(path: Path) -> None:
    """Raise a ``ValueError`` unless this file could be written."""
    if path.is_dir():
        raise ValueError(f"--output must be a file, got the folder {path}")
    check_output_folder(path.parent)


def check_replaced(path: Path, mark: str, rule: str) -> None:
    """Raise a ``ValueError`` if a file is there that lacks the mark of what would replace it.

    Args:
        path: of a file to be written.
        mark: what the first 4,096 bytes of such a file have.
        rule: what the output must be, for the error.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        if mark.encode() not in file.read(4096):
            raise ValueError(f"{rule}, got {path}, which is something else")


def check_output_record(folder: Path, record: str, form: str, beside: Iterable[str]) -> None:
    """Raise a ``ValueError`` unless a record and what is drawn from it may be written here.

    Args:
        folder: of the output, made or to be made.
        record: name of the JSON file.
        form: its ``format``.
        beside: names of the files that are made from it.
    """
    check_output_folder(folder)
    if (folder / record).exists():
        read_json(folder / record, "--output", form)
        return
    for name in beside:
        if (folder / name).exists():
            raise ValueError(
                f"--output must be a new folder or one with a {record}, got {folder} with another "
                f"{name}"
            )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def read_json(
    path: Path,
    argument: str,
    form: str,
    version: int | None = None,
    parts: Mapping[str, type | UnionType] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of a JSON file that a command of ours wrote.

    Args:
        path: of the file.
        argument: what the caller calls it, for the errors.
        form: its ``format``.
        version: the newest that can be read; ``None`` for files without one.
        parts: what it must hold, and of which type.

    Raises:
        ValueError: a file that is not there, damaged, another's or of a newer version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{argument} must be a whole {path.name}, got {path}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != form:
        raise ValueError(f"{argument} must be a file of format {form!r}, got {path}")
    found = record.get("version")
    if version is not None and (not isinstance(found, int) or found > version):
        raise ValueError(
            f"{argument} must be of version {version} or older, got {found!r} in {path}; update ovq"
        )
    for name, kind in parts.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(
                f"{argument} must be a whole {path.name}, got {path} with damaged {name} "
                f"{shorten(repr(record.get(name)), 60)}"
            )
    return record


def read_run(folder: Path) -> dict[str, Any]:
    """The run file of a folder.

    Raises:
        ValueError: the folder is no run, or its run file is damaged or of a newer version.
    """
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        is_model = (Path(folder) / "config.json").is_file()
        hint = "; `ovq convert` makes a run of a pretrained model" if is_model else ""
        raise ValueError(f"RUN must be a run folder with a {RUN_FILE}, got {folder}{hint}")
    run = read_json(path, "RUN", RUN_FORMAT, RUN_VERSION, {"config": dict, "status": str})
    for name, value, rule in _damages(run):
        if not rule(value):
            shown = shorten(repr(value), 60)
            raise ValueError(
                f"RUN must be a whole {RUN_FILE}, got {path} with damaged {name} {shown}"
            )
    return run


class UnreadableRunError(ValueError):
    """The run file of one of many runs is damaged, no run's or of a newer version."""


def read_run_of_many(folder: Path) -> dict[str, Any]:
    """The run file of a run that an experiment made, without which its others can be told of.

    Raises:
        UnreadableRunError: what is wrong with it, and what to do.
    """
    try:
        return read_run(folder)
    except ValueError as error:
        raise UnreadableRunError(
            f"{error}; `ovq experiment` trains it anew once its folder is deleted"
        ) from None


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -LARGEST < value < LARGEST


def _is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0


def _is_figure(value: Any) -> bool:
    return value is None or is_number(value)


def _is_fields(value: Any) -> bool:
    return isinstance(value, dict)


def _is_groups(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(group, dict)
        and all(_is_figure(group[name]) for name in ("asked", "accuracy", "loss") if name in group)
        for group in value.values()
    )


# What the parts of a run file are, where they are there, and what results always have.
_RULES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "": {
        "training": _is_fields,
        "validation": lambda value: _is_fields(value) and "loss" in value,
        "evaluation": _is_fields,
        "weights": lambda value: (
            value is None
            or (_is_fields(value) and all(isinstance(sha, str) for sha in value.values()))
        ),
        "data": lambda value: value is None or _is_fields(value),
    },
    "config": dict.fromkeys(("task", "model", "training"), _is_fields),
    "training": {"steps": _is_count, "tokens_per_second": is_number},
    "validation": {"loss": _is_figure},
    "evaluation": {"results": lambda value: isinstance(value, list)},
}
_OF_A_RESULT: dict[str, Callable[[Any], bool]] = {
    "length": _is_count,
    "num_sequences": _is_count,
    "num_centroids": lambda value: value is None or _is_count(value),
    "setting": lambda value: value is None or isinstance(value, str),
    "loss": _is_figure,
    "accuracy": _is_figure,
    "state_bytes": _is_count,
    "changes": _is_fields,
    "groups": _is_groups,
}
_OPTIONAL = ("changes", "groups")


def _damages(run: dict[str, Any]) -> Iterator[tuple[str, Any, Callable[[Any], bool]]]:
    """Every part of a run file that something is known of: its name, its value, what it must be."""
    for part, rules in _RULES.items():
        held = run.get(part, {}) if part else run
        yield from (
            (f"{part} {name}".strip(), held[name], rules[name]) for name in rules if name in held
        )
    for number, result in enumerate(run.get("evaluation", {}).get("results", [])):
        yield f"result {number}", result, _is_fields
        for name, rule in _OF_A_RESULT.items():
            if name in result or name not in _OPTIONAL:
                yield f"{name} of result {number}", result.get(name, MISSING), rule
