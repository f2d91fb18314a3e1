"""The file of an experiment: what is planned, done, missing and failed, told from its run files."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ovq.evaluate import unmeasured
from ovq.experiments.plan import Entry, Experiment, Trial
from ovq.run_config import environment
from ovq.runs import RUN_FILE, UnreadableRunError, read_json, read_run_of_many, write_text

FILE = "experiment.json"
FORMAT = "ovq-experiment"
VERSION = 1


def read_trial(output: Path, trial: Trial) -> dict[str, Any] | None:
    """The run file of a trial, ``None`` if it was not begun.

    Raises:
        UnreadableRunError: a file that is damaged or no run's.
        ValueError: a run of another configuration, as of an earlier version of the suite.
    """
    folder = output / trial.folder
    if not (folder / RUN_FILE).exists():
        return None
    run = read_run_of_many(folder)
    trial.config.check_is_of(run, folder)
    return run


def _readable(output: Path, trial: Trial) -> dict[str, Any] | None:
    """The same, ``None`` also for a file that cannot be read."""
    try:
        return read_trial(output, trial)
    except UnreadableRunError:
        return None


def validation_loss(run: Mapping[str, Any] | None) -> float | None:
    """The loss by which a learning rate is chosen; ``None`` before it is measured.

    One that is no number is infinite: the training diverged.
    """
    if run is None or "validation" not in run:
        return None
    loss = run["validation"]["loss"]
    return math.inf if loss is None else loss


def chosen_rate(
    experiment: Experiment, entry: Entry, output: Path, failures: Mapping[str, str]
) -> float | None:
    """The learning rate with the smallest loss on validation data, the first of several.

    Returns:
        ``None`` while a candidate that has not failed is not validated, or cannot be read, and if
        none is left.
    """
    losses: dict[float, float] = {}
    for trial in experiment.candidates(entry):
        try:
            loss = validation_loss(read_trial(output, trial))
        except UnreadableRunError:  # it may have been the best: others are not to take its place
            return None
        if loss is not None:
            losses[trial.learning_rate] = loss
        elif str(trial.folder) not in failures:
            return None
    return min(losses, key=lambda rate: losses[rate], default=None)


def trials_of(
    experiment: Experiment, entry: Entry, output: Path, failures: Mapping[str, str]
) -> list[tuple[Trial | None, int, bool]]:
    """The runs of an entry as far as they are settled.

    Returns:
        For each run: which, ``None`` before the learning rate is chosen; its seed; whether its
        points are measured, or it only takes part in the choice.
    """
    rate = chosen_rate(experiment, entry, output, failures)
    candidates = experiment.candidates(entry)
    found: list[tuple[Trial | None, int, bool]] = [
        (trial, trial.seed, trial.learning_rate == rate) for trial in candidates
    ]
    for seed in experiment.seeds[1:]:
        trial = None if rate is None else Trial(entry=entry, learning_rate=rate, seed=seed)
        found.append((trial, seed, True))
    return found


def status(run: Mapping[str, Any] | None, trial: Trial, is_measured: bool) -> str:
    """``missing``, ``unfinished``, or ``done`` with training and all there is to measure."""
    if run is None:
        return "missing"
    lacks = run["status"] != "done" or "validation" not in run
    if lacks or (is_measured and unmeasured(run, trial.entry.points)):
        return "unfinished"
    return "done"


def _run_record(
    output: Path, trial: Trial | None, seed: int, is_measured: bool, failures: Mapping[str, str]
) -> dict[str, Any]:
    if trial is None:
        return {"folder": None, "learning_rate": None, "seed": seed, "status": "missing"}
    name = str(trial.folder)
    try:
        run = read_trial(output, trial)
    except UnreadableRunError as error:
        run, failures = None, {**failures, name: str(error)}
    record: dict[str, Any] = {
        "folder": name,
        "learning_rate": trial.learning_rate,
        "seed": seed,
        "measured": is_measured,
        "status": status(run, trial, is_measured),
    }
    if run is not None:
        record["training_seconds"] = run.get("seconds")
        record["validation_loss"] = run.get("validation", {}).get("loss")
    if record["status"] != "done" and name in failures:
        record |= {"status": "failed", "reason": failures[name]}
    return record


def training_left(output: Path, trial: Trial) -> float:
    """Minutes of training that a run lacks, as estimated."""
    run = _readable(output, trial)
    if run is None:
        return trial.entry.training_minutes
    steps = run.get("training", {}).get("steps", 0)
    left = 1.0 - steps / trial.config.training.num_steps
    return 0.0 if run["status"] == "done" else left * trial.entry.training_minutes


def measuring_left(output: Path, trial: Trial) -> float:
    """Minutes of measuring its points that a run lacks, as estimated."""
    run, entry = _readable(output, trial), trial.entry
    left = entry.points if run is None else unmeasured(run, entry.points)
    return entry.evaluation_minutes * len(left) / max(1, len(entry.points))


def minutes_left(experiment: Experiment, entry: Entry, output: Path) -> tuple[float, float]:
    """Of training and of measuring all runs of an entry, as estimated.

    Before a rate is chosen they are of as many runs as there will be.
    """
    rate = chosen_rate(experiment, entry, output, {})
    training = sum(training_left(output, trial) for trial in experiment.candidates(entry))
    others = len(experiment.seeds) - 1
    if rate is None:
        training += others * entry.training_minutes
        return training, (1 + others) * entry.evaluation_minutes
    chosen = [Trial(entry=entry, learning_rate=rate, seed=seed) for seed in experiment.seeds]
    training += sum(training_left(output, trial) for trial in chosen[1:])
    return training, sum(measuring_left(output, trial) for trial in chosen)


def total_left(experiments: Iterable[Experiment], output: Path) -> float:
    """Minutes of several experiments, as estimated; what they share is trained once."""
    trained: set[tuple[str, str]] = set()
    total = 0.0
    for experiment in experiments:
        for entry in experiment.entries:
            training, measuring = minutes_left(experiment, entry, output)
            total += measuring + training * ((entry.suite, entry.name) not in trained)
            trained.add((entry.suite, entry.name))
    return total


def summarize(experiment: Experiment, output: Path, failures: Mapping[str, str]) -> dict[str, Any]:
    """All that the file of an experiment says, but for how it was started.

    Args:
        experiment: the plan.
        output: folder of all experiments.
        failures: by the folder of a run, why it failed when it was last tried.
    """
    entries = []
    for entry in experiment.entries:
        runs = [
            _run_record(output, *trial, failures)
            for trial in trials_of(experiment, entry, output, failures)
        ]
        entries.append(
            {
                "name": entry.name,
                "suite": entry.suite,
                "minutes_planned": round(experiment.minutes(entry), 1),
                "learning_rate": chosen_rate(experiment, entry, output, failures),
                "points": [asdict(point) for point in entry.points],
                "runs": runs,
            }
        )
    statuses = [run["status"] for entry in entries for run in entry["runs"]]
    return {
        "name": experiment.name,
        "scale": experiment.scale,
        "question": experiment.question,
        "learning_rates": list(experiment.learning_rates),
        "seeds": list(experiment.seeds),
        "counts": {name: statuses.count(name) for name in sorted(set(statuses))},
        "entries": entries,
    }


def write_record(
    experiment: Experiment, output: Path, failures: Mapping[str, str], command: str | None
) -> dict[str, Any]:
    """Write the file of an experiment, beside its place first; its content."""
    begun = {"format": FORMAT, "version": VERSION, "command": command, **environment()}
    record = begun | summarize(experiment, output, failures)
    path = output / experiment.name / FILE
    write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def known_failures(experiment: Experiment, output: Path) -> dict[str, str]:
    """By folder, why runs failed when they were last tried.

    Raises:
        ValueError: a file there that is damaged, or of another scale.
    """
    path = output / experiment.name / FILE
    if not path.exists():
        return {}
    try:
        record = read_json(path, "--output", FORMAT, VERSION, {"scale": str, "entries": list})
        failures = {
            run["folder"]: run["reason"]
            for entry in record["entries"]
            for run in entry["runs"]
            if "reason" in run
        }
    except (ValueError, TypeError, KeyError) as error:
        told = str(error)
        if not isinstance(error, ValueError):
            told = f"--output must hold a whole {FILE}, got {path}: {error!r}"
        raise ValueError(
            f"{told}; delete this file: it is written anew from the runs beside it"
        ) from None
    scale = record["scale"]
    if scale != experiment.scale:
        raise ValueError(
            f"--output must be a folder of experiments of one scale, got {path} of {scale!r}, not "
            f"{experiment.scale!r}"
        )
    return failures
