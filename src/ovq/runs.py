"""Run folders: what a run wrote, read and written without loading anything heavy.

A run folder holds ``run.json`` (configuration, versions, progress, metrics), ``model/`` once
training is done (safetensors), and ``checkpoints/`` while it is not.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUN_FORMAT = "ovq-run"
RUN_VERSION = 1
RUN_FILE = "run.json"
MODEL_FOLDER = "model"


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
    """Write the run file of a folder."""
    whole = {"format": RUN_FORMAT, "version": RUN_VERSION} | run
    write_text(folder / RUN_FILE, json.dumps(whole, indent=1, allow_nan=False) + "\n")


def read_run(folder: Path) -> dict[str, Any]:
    """The run file of a folder.

    Raises:
        ValueError: the folder is no run, or its run file is damaged or of a newer version.
    """
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise ValueError(f"RUN must be a run folder with a {RUN_FILE}, got {folder}")
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"RUN must hold a whole {RUN_FILE}, got {path}: {error}") from None
    if not isinstance(run, dict) or run.get("format") != RUN_FORMAT:
        raise ValueError(f"RUN must hold a {RUN_FILE} of format {RUN_FORMAT!r}, got {path}")
    for key, kind in (("config", dict), ("status", str)):
        if not isinstance(run.get(key), kind):
            raise ValueError(
                f"RUN must hold a {RUN_FILE} with {key!r}, got {run.get(key)!r} in {path}"
            )
    if not isinstance(run.get("version"), int) or run["version"] > RUN_VERSION:
        raise ValueError(
            f"RUN must be of run version {RUN_VERSION} or older, got {run.get('version')!r} in "
            f"{path}; update ovq"
        )
    return run
