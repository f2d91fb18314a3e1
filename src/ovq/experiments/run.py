"""Run an experiment: every run an ordinary run folder, gone on with wherever it was stopped."""

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ovq.evaluate import evaluate_points, unmeasured, validate
from ovq.experiments.plan import Experiment, Trial
from ovq.experiments.record import (
    chosen_rate,
    known_failures,
    measuring_left,
    minutes_left,
    read_trial,
    training_left,
    write_record,
)
from ovq.runs import LOCK_FILE, check_output_folder, command_line
from ovq.train import BusyError, processes, train

# What a run may fail of while the others go on; anything else is a fault of this program.
FAILURES = (ValueError, RuntimeError, OSError, ArithmeticError, MemoryError)

WAIT = 5.0  # seconds between looks at a run that another process is training

# Minutes done, minutes in all, both as estimated, and what is being done.
Progress = Callable[[float, float, str], None]
# The folder of a run that is done or has failed, and what came of it.
Finished = Callable[[Path, str], None]


def run_experiment(
    experiment: Experiment,
    output: Path,
    *,
    only: Collection[str] = (),
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> dict[str, Any]:
    """Train and measure whatever of an experiment is not there yet.

    All entries are run on the first seed, with every learning rate, and measured with the best;
    then on the second seed, and so on: what is interrupted has all entries, of fewer seeds. A run
    that fails is noted and the others go on; the next call tries it again. Ctrl-C ends the step at
    hand. Under ``torchrun`` every process makes this call; they train together, and the first
    measures.

    Args:
        experiment: the plan.
        output: folder of all experiments; runs lie in ``SUITE/ENTRY-lrRATE-seedSEED`` there, and
            the record, ``experiment.json``, in ``SUITE``.
        only: names of the entries to train and measure; none for all. The record tells of all.
        progress: called after every step and every measurement.
        finished: called after every run.

    Returns:
        The record, with ``interrupted`` true if it was.

    Raises:
        ValueError: an output that cannot be written, that another process is writing, or that holds
            experiments of another scale.
    """
    folder = output / experiment.name
    check_output_folder(folder)
    known_failures(experiment, output)  # of another scale, or damaged
    folder.mkdir(parents=True, exist_ok=True)
    first = processes().is_main_process
    try:
        with FileLock(folder / LOCK_FILE).acquire(timeout=0) if first else nullcontext():
            return _Runner(experiment, output, only, progress, finished).run()
    except Timeout:
        raise ValueError(
            f"--output must be a folder that no experiment is running in, got {folder}"
        ) from None


class _Runner:
    """An experiment under way."""

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        only: Collection[str],
        progress: Progress | None,
        finished: Finished | None,
    ):
        self.experiment, self.output = experiment, output
        self.entries = [entry for entry in experiment.entries if not only or entry.name in only]
        self.progress = progress or (lambda done, total, what: None)
        self.finished = finished or (lambda folder, line: None)
        self.command = command_line()
        self.failures = known_failures(experiment, output)  # until they are tried again
        self.tried: set[str] = set()
        self.is_first = processes().is_main_process
        self.done = 0.0
        self.total = sum(sum(minutes_left(experiment, entry, output)) for entry in self.entries)

    def run(self) -> dict[str, Any]:
        """Everything that is missing; the record."""
        self._record()
        processes().wait_for_everyone()
        try:
            for seed in self.experiment.seeds:
                for entry in self.entries:
                    if seed == self.experiment.seeds[0]:
                        for trial in self.experiment.candidates(entry):
                            self._try(trial, self._train)
                    rate = chosen_rate(self.experiment, entry, self.output, self.failures)
                    if rate is not None:
                        trial = Trial(entry=entry, learning_rate=rate, seed=seed)
                        self._try(trial, self._train_and_measure)
        except KeyboardInterrupt:
            return self._record() | {"interrupted": True}
        return self._record() | {"interrupted": False}

    def _try(self, trial: Trial, act: Callable[[Trial], str | None]) -> None:
        """Do something with a trial, and note why it failed if it does."""
        name = str(trial.folder)
        if name in self.failures and name in self.tried:
            return
        self.tried.add(name)
        self.failures.pop(name, None)
        try:
            line = self._when_free(trial, act)
        except FAILURES as error:
            self.failures[name] = " ".join(f"{type(error).__name__}: {error}".split())
            line = f"failed: {self.failures[name]}"
        if line is not None and self.is_first:
            self._record()
            self.finished(self.output / trial.folder, line)
        processes().wait_for_everyone()
        if not self.is_first:  # which measures nothing, and so cannot know what failed there
            self.failures |= known_failures(self.experiment, self.output)

    def _when_free(self, trial: Trial, act: Callable[[Trial], str | None]) -> str | None:
        """Do it once no other process, of a suite that shares the run, is training it."""
        while True:
            try:
                return act(trial)
            except BusyError:
                if processes().num_processes > 1:  # the others have begun, and wait for this one
                    raise
                self.progress(self.done, self.total, f"{trial.folder} waits: another trains it")
                time.sleep(WAIT)

    def _record(self) -> dict[str, Any]:
        if not self.is_first:
            return {}
        return write_record(self.experiment, self.output, self.failures, self.command)

    def _train(self, trial: Trial) -> str | None:
        """Train a run and measure its loss on validation data; what came of it, if it is new."""
        folder, before, minutes = (
            self.output / trial.folder,
            self.done,
            training_left(self.output, trial),
        )
        run = read_trial(self.output, trial)
        if run is not None and run["status"] == "done" and "validation" in run:
            return None
        first_step: list[int] = []

        def progress(step: int, steps: int, loss: float, rate: float) -> None:
            first_step[:] = first_step or [step - 1]
            share = (step - first_step[0]) / max(1, steps - first_step[0])
            self.done = before + share * minutes
            self.progress(
                self.done, self.total, f"{trial.folder} step {step} of {steps}, loss {loss:.3f}"
            )

        run = train(trial.config, folder, progress)
        if run["status"] == "interrupted":
            raise KeyboardInterrupt
        self.done = before + minutes
        if not self.is_first:
            return None
        loss = validate(folder)["loss"]
        return f"trained, validation loss {'nan' if loss is None else f'{loss:.3f}'}"

    def _train_and_measure(self, trial: Trial) -> str | None:
        """The same, and measure its points."""
        line = self._train(trial)
        run = read_trial(self.output, trial)
        if not self.is_first or run is None or not unmeasured(run, trial.entry.points):
            return line
        before, minutes = self.done, measuring_left(self.output, trial)

        def progress(done: int, total: int, last: dict[str, Any]) -> None:
            self.done = before + minutes * done / total
            what = f"{trial.folder} measured {done} of {total}, T={last['length']:,}"
            self.progress(self.done, self.total, what)

        evaluate_points(self.output / trial.folder, trial.entry.points, progress=progress)
        return "trained and measured" if line else "measured"
