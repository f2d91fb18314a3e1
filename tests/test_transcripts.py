"""Pages that are transcripts: their commands and their code say what they show."""

import doctest
import random
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ovq.models
from ovq.cli import app
from ovq.models.cache import CACHE_FIELD
from tests.conversion.conftest import save_source

DOCS = Path(__file__).parents[1] / "docs"


def words(count: int, seed: int) -> str:
    """A text of so many letters."""
    rng = random.Random(seed)
    some = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(50)]
    return " ".join(rng.choices(some, k=count))[:count]


def blocks(name: str) -> list[tuple[str, str]]:
    """What a page shows: commands, code and what the code prints."""
    page = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(r"```(console|python|text)\n(.*?)```", page, flags=re.DOTALL)


def follow(name: str, capsys) -> dict:
    """Do what a page says and check what it shows; the names that its code made."""
    names: dict = {"__name__": "page"}
    printed = ""
    for kind, block in blocks(name):
        if kind == "console":
            for command, expected in re.findall(r"^\$ ovq (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
                result = CliRunner().invoke(app, shlex.split(command))
                assert result.exit_code in (0, 2), result.output
                check(expected, result.stdout + result.stderr)
        elif kind == "python":
            # The argument has another name before transformers 5.24.
            code = block.replace("cache=memory.as_prefix()", f"{CACHE_FIELD}=memory.as_prefix()")
            exec(compile(code, f"docs/{name}", "exec"), names)
            printed = capsys.readouterr().out
        else:
            check(block, printed)
    return names


@pytest.mark.plain  # the commands run as users run them
def test_the_page_on_state_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books/first.txt").write_text(words(12_000, 1))
    (tmp_path / "books/second.txt").write_text(words(9_000, 2))
    names = follow("state_files.md", capsys)
    assert {"both.state", "later.state"} <= {path.name for path in tmp_path.iterdir()}
    assert "18,009 tokens in 800,832 bytes" in printed_by_the_code(names)


@pytest.mark.plain
def test_the_page_on_pretrained_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_source(tmp_path / "source")
    (tmp_path / "book.txt").write_text(words(600, 1))
    follow("pretrained.md", capsys)
    assert (tmp_path / "book.md").read_text().count("\n") == 4


@pytest.mark.plain
def test_the_page_on_the_operator(capsys):
    assert "alone" in follow("operator.md", capsys)


def printed_by_the_code(names: dict) -> str:
    later = names["later"]
    assert isinstance(later, ovq.models.OVQCache)
    return f"{later.num_columns:,} tokens in {later.num_bytes:,} bytes"


def check(expected: str, found: str) -> None:
    """Line by line, ``...`` standing for anything."""
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS
    assert checker.check_output(expected, found, flags), f"{expected}\n--- is not ---\n{found}"


@pytest.mark.parametrize(("name", "number"), [("state_files.md", 4), ("pretrained.md", 2)])
def test_there_is_something_to_run(name, number):
    found = blocks(name)
    assert sum(block.count("$ ovq ") for kind, block in found if kind == "console") > number
    assert {"console", "python", "text"} == {kind for kind, _ in found}
