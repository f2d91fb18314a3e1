"""The code in the README runs, the examples in docstrings give what they say."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import ovq
import ovq.theory
from ovq.benchmark_report import markdown, read_benchmark, summary
from ovq.report.records import EXPERIMENT_FILE as RECORD
from ovq.report.records import read_suite
from ovq.report.scores import scores_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
THEORY = (ROOT / "docs/theory.md").read_text(encoding="utf-8")
MODULES = [module.name for module in pkgutil.walk_packages(ovq.__path__, "ovq.")]


@pytest.mark.plain  # the examples run as users run them
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_readme_code_runs(block, capsys):
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "bytes" in capsys.readouterr().out


@pytest.mark.plain
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", THEORY, flags=re.DOTALL))
def test_theory_code_runs(block):
    assert "assert " in block
    exec(compile(block, "docs/theory.md", "exec"), {"__name__": "theory"})


def test_the_theory_page_names_and_runs_every_statement():
    code = "".join(re.findall(r"```python\n(.*?)```", THEORY, flags=re.DOTALL))
    statements = re.findall(r"^\| [\w' -]*\| `(\w+)` \|", THEORY, flags=re.MULTILINE)
    known = {name for name in ovq.theory.__all__ if re.search("_(is|are|has)_", name)}
    assert known == set(statements)
    assert [name for name in statements if f"{name}(" not in code and f"({name}," not in code] == []


@pytest.mark.plain
@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    names = {"torch": torch, "ovq_attention": ovq.ovq_attention, **vars(module)}
    results = doctest.testmod(module, extraglobs=names)
    assert results.failed == 0


@pytest.mark.plain
def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) > 0 for test in found) >= 8


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "results").glob("*/README.md"))


def anchors_of(page):
    """What the headings of a Markdown page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_headings_that_a_page_links_to_exist(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if not target.startswith(("http:", "https:")):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors_of(file), f"{target}#{anchor}"
    for path in re.findall(r"`((?:src|docs|results|tests)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_readme_links_and_the_index_names_every_page():
    assert len(re.findall(r"\]\(([^)]+)\)", README)) > 10
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"| [{page.name}]({page.name}) |" in index


def test_the_project_speaks_of_itself_alone():
    """No absolute path of a developer's machine stands in code, docs or run files."""
    kinds = {".py", ".md", ".toml", ".json", ".cff", ".txt", ".cpp", ".h"}
    folders = ("src", "tests", "docs", "results", "benchmarks")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in kinds]
    machine = re.compile("/" + "work/|/" + "root/|/" + "tmp/")
    assert [str(path) for path in files if machine.search(path.read_text())] == []


def test_the_readme_table_is_the_benchmarks():
    result = read_benchmark(ROOT / "results/bench/bench.json")
    table = re.search(
        r"<!-- from results/bench/bench.json -->\n(.*?)<!-- end -->", README, re.DOTALL
    )
    assert table is not None
    assert table[1] == summary(result)
    assert (ROOT / "results/bench/table.md").read_text() == markdown(result)


def test_the_readme_shows_what_the_experiments_measured():
    """Every figure of the table, by model, share of bytes and chunks, at 65,536 tokens."""
    block = re.search(r"<!-- from results/experiments -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert block is not None
    measured = {
        name: {
            str(score.accuracy): score
            for score in scores_of(read_suite(ROOT / f"results/experiments/{name}/{RECORD}"))
            if (score.length, score.changes["tokens_per_pair"]) == (65_536, 32)
        }
        for name in ("recall", "positional")
    }
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in block[1].splitlines()[2:]]
    assert len(rows) >= 10
    for label, share, *cells in rows:
        for name, cell in zip(measured, cells, strict=True):
            score = measured[name].get(cell)
            assert score or not cell, (label, name, cell)
            if score and score.setting:
                assert score.setting.startswith(share.replace(" ", "")), (label, cell)
                assert score.model == ("ovq_paper" if "paper" in label else "ovq")
