"""The file of an experiment: what is planned, done, missing and failed, told from its run files."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ovq.evaluate import unmeasured
from ovq.experiments.plan import Entry, Experiment, Trial
from ovq.run_config import environment
from ovq.runs import RUN_FILE, read_json, read_run, write_text

FILE = "experiment.json"
FORMAT = "ovq-experiment"
VERSION = 1


def read_trial(output: Path, trial: Trial) -> dict[str, Any] | None:
    """The run file of a trial, ``None`` if it was not begun.

    Raises:
        ValueError: a file that is damaged or no run's, or a run of another configuration, as of an
            earlier version of the suite.
    """
    folder = output / trial.folder
    if not (folder / RUN_FILE).exists():
        return None
    run = read_run(folder)
    trial.config.check_is_of(run, folder)
    return run


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
        ``None`` while a candidate that has not failed is not validated, and if none is left.
    """
    losses: dict[float, float] = {}
    for trial in experiment.candidates(entry):
        loss = validation_loss(read_trial(output, trial))
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
    run = read_trial(output, trial)
    record: dict[str, Any] = {
        "folder": str(trial.folder),
        "learning_rate": trial.learning_rate,
        "seed": seed,
        "measured": is_measured,
        "status": status(run, trial, is_measured),
    }
    if run is not None:
        record["training_seconds"] = run.get("seconds")
        record["validation_loss"] = run.get("validation", {}).get("loss")
    if record["status"] != "done" and str(trial.folder) in failures:
        record |= {"status": "failed", "reason": failures[str(trial.folder)]}
    return record


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
    record = read_json(path, "--output", FORMAT, VERSION, {"scale": str, "entries": list})
    scale = record["scale"]
    try:
        failures = {
            run["folder"]: run["reason"]
            for entry in record["entries"]
            for run in entry["runs"]
            if "reason" in run
        }
    except (TypeError, KeyError) as error:
        raise ValueError(f"--output must hold a whole {FILE}, got {path}: {error!r}") from None
    if scale != experiment.scale:
        raise ValueError(
            f"--output must be a folder of experiments of one scale, got {path} of {scale!r}, not "
            f"{experiment.scale!r}"
        )
    return failures
