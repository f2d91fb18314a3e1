"""What an experiment is: a question and the runs that answer it, as frozen values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ovq.experiments.costs import evaluation_minutes, training_minutes
from ovq.points import Point
from ovq.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of an experiment, to be trained at several learning rates and seeds.

    Attributes:
        suite: in whose folder its runs lie; another's, if experiments share them.
        name: of the model there.
        config: its run, but for learning rate and seed.
        points: what is measured of the runs with the chosen learning rate.
    """

    suite: str
    name: str
    config: RunConfig
    points: tuple[Point, ...]

    @property
    def training_minutes(self) -> float:
        """An estimate for one run, on two cores."""
        return training_minutes(self.config)

    @property
    def evaluation_minutes(self) -> float:
        """An estimate for one run, on two cores."""
        return evaluation_minutes(self.config, self.points)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of an entry.

    Attributes:
        entry: what is trained.
        learning_rate: at which.
        seed: of weights and data.
    """

    entry: Entry
    learning_rate: float
    seed: int

    @property
    def folder(self) -> Path:
        """Of the run, below that of all experiments."""
        name = f"{self.entry.name}-lr{self.learning_rate:g}-seed{self.seed}"
        return Path(self.entry.suite) / name

    @property
    def config(self) -> RunConfig:
        """What the run is."""
        training = replace(
            self.entry.config.training, learning_rate=self.learning_rate, seed=self.seed
        )
        return replace(self.entry.config, training=training)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, and the models that answer it.

    Each entry is first trained with every learning rate on the first seed; the one with the
    smallest loss on validation data is then used for all seeds.

    Attributes:
        name: of the suite.
        scale: of its sizes, such as ``demo``.
        question: what it answers.
        entries: in the order in which they run.
        learning_rates: to choose from, the same for all entries.
        seeds: of weights and data.

    Raises:
        ValueError: nothing to run, or a name, rate or seed given twice.
    """

    name: str
    scale: str
    question: str
    entries: tuple[Entry, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self):
        names = [(entry.suite, entry.name) for entry in self.entries]
        for name, values in (
            ("entries", names), ("learning_rates", self.learning_rates), ("seeds", self.seeds),
        ):  # fmt: skip
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be at least one, each once, got {list(values)}")

    def candidates(self, entry: Entry) -> list[Trial]:
        """The runs of an entry among which its learning rate is chosen."""
        seed = self.seeds[0]
        return [Trial(entry=entry, learning_rate=rate, seed=seed) for rate in self.learning_rates]

    @property
    def runs_an_entry(self) -> int:
        """The candidates, and the chosen one at the other seeds."""
        return len(self.learning_rates) + len(self.seeds) - 1

    def minutes(self, entry: Entry) -> float:
        """An estimate for all runs of an entry, on two cores."""
        training = self.runs_an_entry * entry.training_minutes
        return training + len(self.seeds) * entry.evaluation_minutes


def total_minutes(experiments: Iterable[Experiment]) -> float:
    """An estimate for several experiments, on two cores; what they share is trained once."""
    return sum(_parts(experiments))


def _parts(experiments: Iterable[Experiment]) -> Iterator[float]:
    trained = set()
    for experiment in experiments:
        for entry in experiment.entries:
            yield len(experiment.seeds) * entry.evaluation_minutes
            if (entry.suite, entry.name) not in trained:
                yield experiment.runs_an_entry * entry.training_minutes
            trained.add((entry.suite, entry.name))
