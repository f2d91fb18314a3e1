"""Write a report: the page, its charts as pictures, its tables as Markdown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovq import __version__
from ovq.report.charts import Chart, altair, save_png
from ovq.report.page import render
from ovq.report.records import Sources, read_sources
from ovq.report.run_table import markdown, read_results
from ovq.report.sections import SECTIONS, Section, costs, goals, other, runs, status
from ovq.runs import (
    check_output_folder,
    command_line,
    damage_refused,
    distinct_folders,
    write_text,
)

PAGE, RUN_TABLE, TABLES = "index.html", "table.md", "tables.md"
MARK = "<title>ovq report</title>"  # in the page's head

# Called after every picture with those done and those in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written.

    Attributes:
        rows: of runs given by themselves, as :func:`read_results` returns them.
        counts: of each suite, runs by status.
        files: that were written.
    """

    rows: list[dict[str, Any]]
    counts: Mapping[str, Mapping[str, int]]
    files: tuple[Path, ...]


def report(folders: list[Path], output: Path, progress: Progress | None = None) -> Report:
    """Write ``index.html``, a PNG of each chart, and the tables as Markdown into a folder.

    ``table.md`` holds the runs that are given by themselves, ``tables.md`` the experiments and
    comparisons. What lies in the folder beside these is left alone.

    Args:
        folders: of runs, of experiments, or with the record of a comparison.
        output: folder to write to.
        progress: called after every picture.

    Raises:
        ValueError: as :func:`read_sources` and :func:`read_results`, or an output that cannot be
            written or has a page or tables of something else.
        ImportError: altair or vl-convert-python is not installed.
    """
    check_output_folder(output)
    sources = read_sources(folders)
    rows = read_results(sources.runs)
    altair()
    of_runs = [runs(rows, sources.runs)] if rows else []
    of_suites = _sections(sources)
    sections = [*of_suites, *of_runs]
    charts = [chart for section in sections for chart in section.charts]
    _check_names(charts)
    _check_ours(output, [PAGE, TABLES, RUN_TABLE, *(_picture(chart) for chart in charts)])
    files = [output / PAGE]
    write_text(files[0], render(sections, version=__version__, command=command_line()))
    if of_suites:
        files.append(output / TABLES)
        write_text(files[-1], "\n".join(map(_as_markdown, of_suites)))
    if rows:
        named = ", ".join(str(folder) for folder in distinct_folders(sources.runs))
        files.append(output / RUN_TABLE)
        write_text(files[-1], markdown(rows) + f"\nFrom the run files of {named}.\n")
    files += _save_charts(charts, output, progress)
    counts = {suite.name: suite.counts for suite in sources.suites}
    return Report(rows=rows, counts=counts, files=tuple(files))


def _picture(chart: Chart) -> str:
    return f"{chart.name}.png"


def _check_ours(output: Path, names: Sequence[str]) -> None:
    """Raise if files of these names are there, but in the folder of an earlier report."""
    page = output / PAGE
    if page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:4096]:
        return
    for name in names:
        if (output / name).exists():
            raise ValueError(
                f"--output must be a new folder or that of a report, got {output / name}, which "
                "is no report's"
            )


def _check_names(charts: Sequence[Chart]) -> None:
    names = [chart.name for chart in charts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"RUN must name each thing to draw once, got {name} twice")


def _save_charts(charts: Sequence[Chart], output: Path, progress: Progress | None) -> list[Path]:
    files = []
    for chart in charts:
        files.append(output / _picture(chart))
        save_png(chart, files[-1])
        if progress is not None:
            progress(len(files), len(charts))
    return files


def _sections(sources: Sources) -> list[Section]:
    """Those of suites and comparisons, in order; none without any."""
    named = {suite.name: suite for suite in sources.suites}
    ordered = [named[n] for n in SECTIONS if n in named]
    ordered += [suite for suite in sources.suites if suite.name not in SECTIONS]
    found = []
    for suite in ordered:
        with damage_refused(f"RUN must hold a whole record and whole runs, got {suite.path}"):
            found.append(SECTIONS.get(suite.name, other)(suite))
    with damage_refused("RUN must hold whole records and whole runs"):
        paid = costs(ordered, sources.comparisons)
        if ordered:
            found = [status(ordered, SECTIONS), goals(ordered), *found]
    return [*found, *([paid] if paid else [])]


def _as_markdown(section: Section) -> str:
    parts = [f"## {section.title}", f"*{section.question}*", *filter(None, section.notes)]
    if section.incomplete:
        parts.append("Incomplete:\n\n" + "\n".join(f"* {line}" for line in section.incomplete))
    parts += [f"![{chart.title}]({chart.name}.png)" for chart in section.charts]
    parts += [f"**{table.caption}**\n\n{table.markdown()}".rstrip() for table in section.tables]
    return "\n\n".join(parts) + "\n"
