"""Output paths are checked before the work, and what an extra lacks is said with its remedy."""

import os
import runpy
import sys
from pathlib import Path

import pytest

import ovq
from ovq.runs import check_output_file, check_output_folder, distinct_folders

SOURCE = Path(ovq.__file__).parent


def test_output_folders(tmp_path):
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path, tmp_path / "new", tmp_path / "new/er", Path("new")):
        check_output_folder(path)
        check_output_file(path / "file")
    for path in (tmp_path / "file", tmp_path / "file/new"):
        with pytest.raises(ValueError, match=rf"--output must be a folder, got {path}"):
            check_output_folder(path)
        with pytest.raises(ValueError, match="--output must be a folder"):
            check_output_file(path / "page.html")
    with pytest.raises(ValueError, match=f"--output must be a file, got the folder {tmp_path}"):
        check_output_file(tmp_path)
    check_output_file(tmp_path / "file")


def test_output_folders_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ValueError, match="--output must be a folder that can be written to"):
        check_output_folder(tmp_path / "new")


def test_distinct_folders_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ways = [Path("b"), Path("a"), tmp_path / "b", Path("a/")]
    assert distinct_folders(ways) == [Path("b"), Path("a")]


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("train.py", "filelock"),
        ("train.py", "transformers"),
        ("loading.py", "safetensors"),
        ("models/__init__.py", "transformers"),
        ("tasks/tokenization.py", "tokenizers"),
    ],
)
def test_a_missing_extra_is_named_with_what_installs_it(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*: pip install 'ovq\[\w+\]'"):
        runpy.run_path(str(SOURCE / module))
