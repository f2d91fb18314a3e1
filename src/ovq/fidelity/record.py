"""``fidelity.json``: begun, gone on with, or refused where it is damaged or another's."""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

import ovq
from ovq.fidelity.methods import METHODS
from ovq.runs import LOCK_FILE, read_json, write_text

FORMAT = "ovq-fidelity"
PARTS = {
    "config": dict, "machine": dict, "methods": dict, "status": str, "errors": list, "times": list,
}  # fmt: skip
ROW = {
    "distribution": str, "part": int, "method": str, "num_centroids": int, "num_bytes": int,
    "error": int | float,
}  # fmt: skip
METHOD = {"doc": str, "dictionary": dict, "swept": bool}
TIME = {"method": str, "median": int | float}
# The bytes and the digest of each file that is read, by name.
Data = dict[str, dict[str, Any]]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, made if it is not there.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"output must be a folder that no other run writes to, got {folder}"
        ) from None
    try:
        yield
    finally:
        lock.release()


def begin(config: dict[str, Any], path: Path, data: Data | None = None) -> dict[str, Any]:
    """The content to go on with: that of ``path``, or an empty one.

    Args:
        config: what is to be measured, as plain values.
        path: ``fidelity.json``, there or not.
        data: what is read, as :func:`~ovq.fidelity.pretrained.fingerprint` has it now.

    Raises:
        ValueError: the file there is damaged, or of another configuration, other methods or other
            data.
    """
    plain = json.loads(json.dumps(config))
    methods = {
        name: {"doc": m.doc, "dictionary": m.dictionary, "swept": m.swept}
        for name, m in METHODS.items()
    }
    if not path.exists():
        return {
            "format": FORMAT, "config": plain, "data": data or {}, "machine": _machine(),
            "methods": methods, "status": "unfinished", "errors": [], "times": [],
        }  # fmt: skip
    result = read_fidelity(path)
    told, now = _but_for_words(result["methods"]), _but_for_words(methods)
    for what, same in (("configuration", result["config"] == plain), ("methods", told == now)):
        if not same:
            raise ValueError(
                f"output must be empty or of the same {what}, got {path} with others: give "
                "another output folder"
            )
    _check_data(result.get("data"), data or {}, path)
    return result


def _but_for_words(methods: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    return {name: (method["dictionary"], method["swept"]) for name, method in methods.items()}


def _check_data(told: Data | None, found: Data, path: Path) -> None:
    if told is None or told == found:  # none: of a version that kept no digests
        return
    changed = sorted(name for name in told | found if told.get(name) != found.get(name))
    raise ValueError(
        f"model and text must be those that {path} began with, got another {', '.join(changed)}: "
        "give another output folder"
    )


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ovq": ovq.__version__,
    }


def write_fidelity(path: Path, result: dict[str, Any]) -> None:
    """Write the file, or leave the old one."""
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def read_fidelity(path: Path) -> dict[str, Any]:
    """The content of a ``fidelity.json``.

    Raises:
        ValueError: the file is damaged or another's.
    """
    result = read_json(Path(path), "path", FORMAT, parts=PARTS)
    broken = _broken_part(result)
    if broken is not None:
        raise ValueError(f"path must be a whole fidelity.json, got {path} with damaged {broken}")
    return result


def _broken_part(result: dict[str, Any]) -> str | None:
    """The name of the first part that is not as it is written."""
    if not all(_is_row(method, METHOD) for method in result["methods"].values()):
        return "methods"
    for name, kinds in (("errors", ROW), ("times", TIME)):
        rows = result[name]
        if not all(_is_row(row, kinds) and row["method"] in result["methods"] for row in rows):
            return name
    return None


def _is_row(row: Any, kinds: dict[str, Any]) -> bool:
    return isinstance(row, dict) and all(
        isinstance(row.get(name), kind) for name, kind in kinds.items()
    )
