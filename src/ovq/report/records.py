"""What a report is made from: run folders, records of experiments, records of comparisons."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ovq.runs import (
    RUN_FILE,
    UnreadableRunError,
    distinct_folders,
    is_number,
    read_json,
    read_run_of_many,
)

EXPERIMENT_FILE = "experiment.json"
COMPARISON_FILE = "compare.json"
EXPERIMENT = "ovq-experiment"
EXPERIMENT_VERSION = 1
EXPERIMENT_PARTS = {
    "name": str, "scale": str, "question": str, "learning_rates": list, "seeds": list,
    "entries": list, "versions": dict,
}  # fmt: skip
COMPARISON = "ovq-compare"
COMPARISON_PARTS = {
    "command": str, "machine": dict, "config": dict, "reference": str, "models": dict,
    "figures": list,
}  # fmt: skip
# A run's own, or where its text lies on one machine.
OF_ONE_RUN = {("training", "learning_rate"), ("training", "seed"), ("task", "source")}
STATUSES = ("done", "unfinished", "missing", "failed")


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """One run that an experiment plans.

    Attributes:
        folder: as the record names it, ``None`` before its learning rate is chosen.
        seed: of weights and data.
        is_measured: whether its points are measured, or it only takes part in choosing a rate.
        status: one of ``STATUSES``, from the run file as it is now.
        reason: why it failed, if it did.
        run: the run file's content, if there is one.
    """

    folder: str | None
    seed: int
    is_measured: bool
    status: str
    reason: str | None = None
    run: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class SuiteEntry:
    """One model of an experiment: what is planned to be measured of it, and its runs."""

    name: str
    learning_rate: float | None
    points: tuple[Mapping[str, Any], ...]
    runs: tuple[TrainedRun, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the first run that was begun, empty if none was."""
        return next((run.run["config"] for run in self.runs if run.run), {})


@dataclass(frozen=True, kw_only=True)
class Suite:
    """An experiment, read from its record and the run files that it names."""

    name: str
    path: Path
    record: Mapping[str, Any]
    entries: tuple[SuiteEntry, ...]

    @property
    def seeds(self) -> list[int]:
        """That every entry is planned with."""
        return self.record["seeds"]

    @property
    def counts(self) -> dict[str, int]:
        """Runs by status."""
        found = [run.status for entry in self.entries for run in entry.runs]
        return {status: found.count(status) for status in STATUSES}


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All that one report is made from."""

    runs: list[Path] = field(default_factory=list)
    suites: list[Suite] = field(default_factory=list)
    comparisons: dict[Path, Mapping[str, Any]] = field(default_factory=dict)


def read_sources(folders: Iterable[Path]) -> Sources:
    """What the folders hold, each read once.

    Args:
        folders: run folders, folders of experiments or of one suite, folders with the record of a
            comparison.

    Raises:
        ValueError: a folder with nothing of these, a damaged or foreign file, a suite given twice.
    """
    runs: list[Path] = []
    experiments: list[Path] = []
    comparisons: list[Path] = []
    for folder in distinct_folders(folders):
        inside = [folder / EXPERIMENT_FILE, *sorted(folder.glob(f"*/{EXPERIMENT_FILE}"))]
        found = [path for path in inside if path.is_file()]
        compared = [path for path in (folder / COMPARISON_FILE,) if path.is_file()]
        if (folder / RUN_FILE).is_file():
            runs.append(folder)
        elif not found and not compared:
            deeper = sorted({path.parents[1] for path in folder.glob(f"*/*/{EXPERIMENT_FILE}")})
            hint = "".join(f"; {path} is one" for path in deeper[:1])
            raise ValueError(
                f"RUN must be a run folder with a {RUN_FILE}, a folder of experiments with "
                f"{EXPERIMENT_FILE}, or one with a {COMPARISON_FILE}, got {folder}{hint}"
            )
        experiments += found
        comparisons += compared
    suites = [read_suite(path) for path in distinct_folders(experiments)]
    _check_distinct(suites)
    read = {path: read_comparison(path) for path in comparisons}
    return Sources(runs=runs, suites=suites, comparisons=read)


def _check_distinct(suites: list[Suite]) -> None:
    paths: dict[str, Path] = {}
    for suite in suites:
        other = paths.setdefault(suite.name, suite.path)
        if other != suite.path:
            raise ValueError(
                f"RUN must name each suite once, got {suite.name} from {other} and {suite.path}"
            )


def read_comparison(path: Path) -> Mapping[str, Any]:
    """The record of a comparison.

    Args:
        path: of its ``compare.json``.

    Raises:
        ValueError: a damaged or foreign file.
    """
    record = read_json(path, "RUN", COMPARISON, parts=COMPARISON_PARTS)
    for row in record["figures"]:
        if not _is_figure(row) or row["mixer"] not in record["models"]:
            raise ValueError(
                f"RUN must hold a whole {path.name}, got {path} with the figure {row!r:.100}"
            )
    return record


def _is_figure(row: Any) -> bool:
    """Whether it is one row of a comparison."""
    if not isinstance(row, dict) or {"mixer", "length", "figure", "samples"} - row.keys():
        return False
    samples = row["samples"]
    return (
        all(isinstance(row[name], str) for name in ("mixer", "figure"))
        and is_number(row["length"])
        and isinstance(samples, list)
        and all(is_number(sample) and sample > 0 for sample in samples)
    )


def read_suite(path: Path) -> Suite:
    """An experiment and its runs; one whose file cannot be read has failed.

    Args:
        path: of its ``experiment.json``; its runs lie where that says, below the folder above.

    Raises:
        ValueError: a damaged or foreign record, or a run that it does not plan.
    """
    try:
        record = read_json(path, "RUN", EXPERIMENT, EXPERIMENT_VERSION, EXPERIMENT_PARTS)
    except ValueError as error:
        raise ValueError(f"{error}; `ovq experiment` writes it anew once it is deleted") from None
    try:
        _check_names(path, [record["name"], *(entry["name"] for entry in record["entries"])])
        entries = tuple(
            SuiteEntry(
                name=entry["name"],
                learning_rate=entry["learning_rate"],
                points=tuple(entry["points"]),
                runs=tuple(_read_run(path, entry, run) for run in entry["runs"]),
            )
            for entry in record["entries"]
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"RUN must hold a whole {path.name}, got {path}: {error!r}") from None
    for entry in entries:
        _check_alike(entry)
    return Suite(name=record["name"], path=path, record=record, entries=entries)


def _check_alike(entry: SuiteEntry) -> None:
    """Raise unless its runs differ in rate and seed alone, and were asked the same questions."""
    told = [(run.folder, _what_is_shared(run.run)) for run in entry.runs if run.run]
    for folder, found in told[1:]:
        first, expected = told[0]
        for name in sorted(expected.keys() & found.keys()):
            if expected[name] != found[name]:
                raise ValueError(
                    f"RUN must hold seeds of one model, got {folder} with {name} = "
                    f"{found[name]!r} and {first} with {expected[name]!r}"
                )


def _what_is_shared(run: Mapping[str, Any]) -> dict[str, Any]:
    """What the seeds of an entry have in common, by name."""
    config, evaluation = run["config"], run.get("evaluation", {})
    found = {
        f"{part}.{name}": value
        for part in ("task", "model", "training")
        for name, value in config.get(part, {}).items()
        if (part, name) not in OF_ONE_RUN
    }
    return found | ({"evaluation.seed": evaluation["seed"]} if "seed" in evaluation else {})


def _check_names(path: Path, names: list[Any]) -> None:
    """Raise unless they are words, which pictures can be named after, and each entry's once."""
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", name):
            raise ValueError(
                f"RUN must hold a whole {path.name}, got {path} with the name {name!r:.100}"
            )
    twice = sorted(name for name, number in Counter(names[1:]).items() if number > 1)
    if twice:
        raise ValueError(f"RUN must tell each entry once, got {path} with {twice[0]} again")


def _read_run(path: Path, entry: Mapping[str, Any], told: Mapping[str, Any]) -> TrainedRun:
    """A run as its file is now: the record may be older."""
    folder, is_measured = told["folder"], told.get("measured", True)
    run, reason = None, told.get("reason")
    try:
        run = None if folder is None else _run_at(path, entry, told)
    except UnreadableRunError as error:
        reason = str(error)
    status = _status(run, entry["points"] if is_measured else [])
    if status == "done" or reason is None:
        reason = None
    else:
        status = "failed"
    return TrainedRun(
        folder=folder, seed=told["seed"], is_measured=is_measured, status=status, reason=reason,
        run=run,
    )  # fmt: skip


def _run_at(
    path: Path, entry: Mapping[str, Any], told: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The run file that a record tells of, if it is there; it must be of that model and seed."""
    inside = Path(told["folder"])
    if inside.is_absolute() or ".." in inside.parts:
        raise ValueError(f"RUN must name runs beside {path}, got {inside}")
    place = path.resolve().parent.parent / inside
    if not (place / RUN_FILE).is_file():
        return None
    run = read_run_of_many(place)
    training = run["config"].get("training", {})
    planned = {
        "name": f"{entry['suite']}-{entry['name']}", "seed": told["seed"],
        "learning_rate": told["learning_rate"],
    }  # fmt: skip
    found = {"name": run["config"].get("name")} | {
        name: training.get(name) for name in ("seed", "learning_rate")
    }
    for name, value in planned.items():
        if found[name] != value:
            raise ValueError(
                f"RUN must hold the runs that {path} plans, got {place} with {name} = "
                f"{found[name]!r}, not {value!r}"
            )
    return run


def _status(run: Mapping[str, Any] | None, points: list[Mapping[str, Any]]) -> str:
    if run is None:
        return "missing"
    whole = run["status"] == "done" and "validation" in run
    return "done" if whole and all(result_at(run, point) for point in points) else "unfinished"


def result_at(run: Mapping[str, Any], point: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a run file says about a planned point, ``None`` before it is measured."""
    for result in run.get("evaluation", {}).get("results", []):
        same = all(result.get(name) == point[name] for name in ("length", "num_sequences"))
        if not same or result.get("changes", {}) != point["changes"]:
            continue
        if point["setting"] in (None, result.get("setting")):
            return result
    return None
