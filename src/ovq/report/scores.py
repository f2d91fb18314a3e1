"""What was measured of one model at one point, over seeds: means and spread."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ovq.report.records import Suite, SuiteEntry, result_at

Pick = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True, kw_only=True)
class Values:
    """One figure of each seed that has it.

    Attributes:
        by_seed: finite numbers.
        num_planned: seeds that are planned.

    >>> values = Values(by_seed={0: 0.5, 1: 0.75}, num_planned=3)
    >>> values.mean, values.low, values.high, str(values)
    (0.625, 0.5, 0.75, '0.625 ± 0.125 (2 of 3)')
    """

    by_seed: Mapping[int, float]
    num_planned: int

    @property
    def mean(self) -> float | None:
        """Over seeds; ``None`` of none."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def low(self) -> float | None:
        """The smallest."""
        return min(self.by_seed.values(), default=None)

    @property
    def high(self) -> float | None:
        """The largest."""
        return max(self.by_seed.values(), default=None)

    @property
    def is_whole(self) -> bool:
        """Whether no seed is lacking."""
        return len(self.by_seed) >= self.num_planned

    @property
    def spread(self) -> float | None:
        """The largest distance of a seed from the mean; ``None`` of fewer than two."""
        if len(self.by_seed) < 2:
            return None
        mean = fmean(self.by_seed.values())
        return max(abs(value - mean) for value in self.by_seed.values())

    def shared_with(self, other: "Values") -> "Values":
        """What is known of the seeds that another has too, so that means compare like with like."""
        kept = {seed: value for seed, value in self.by_seed.items() if seed in other.by_seed}
        return Values(by_seed=kept, num_planned=self.num_planned)

    def less(self, other: "Values") -> "Values":
        """The differences from another, of the seeds that both have."""
        gains = {
            seed: value - other.by_seed[seed]
            for seed, value in self.by_seed.items()
            if seed in other.by_seed
        }
        return Values(by_seed=gains, num_planned=self.num_planned)

    def text(self, form: Callable[[float], str] = "{:.3f}".format) -> str:
        """Mean and spread, and how many seeds there are if some lack."""
        if self.mean is None:
            return f"0 of {self.num_planned}"
        spread = "" if self.spread is None else f" ± {form(self.spread)}"
        lack = "" if self.is_whole else f" ({len(self.by_seed)} of {self.num_planned})"
        return form(self.mean) + spread + lack

    def __str__(self) -> str:
        return self.text()

    def each(self, form: Callable[[float], str] = "{:.3f}".format) -> str:
        """All of them, by seed."""
        return ", ".join(f"{seed}: {form(value)}" for seed, value in sorted(self.by_seed.items()))


@dataclass(frozen=True, kw_only=True)
class Score:
    """One planned point of one model, and what its seeds were measured to be.

    Attributes:
        suite: that it belongs to.
        model: name of the entry.
        mixer: of the layer that models differ in; empty before a run was begun.
        length: of the context.
        setting: slots of the dictionary as written, ``None`` for models without one.
        changes: fields of the task other than trained.
        learning_rate: the chosen one.
        results: of each measured seed, as in the run file.
        num_planned: seeds.
    """

    suite: str
    model: str
    mixer: str
    length: int
    setting: str | None
    changes: Mapping[str, Any]
    learning_rate: float | None
    results: Mapping[int, Mapping[str, Any]]
    num_planned: int

    def values(self, pick: Pick) -> Values:
        """One figure of every seed; what is no number is left out, as if it were not measured."""
        found = {seed: pick(result) for seed, result in self.results.items()}
        numbers = {seed: float(value) for seed, value in found.items() if value is not None}
        return Values(by_seed=numbers, num_planned=self.num_planned)

    @property
    def accuracy(self) -> Values:
        """Share of right answers."""
        return self.values(lambda result: result["accuracy"])

    def group(self, name: str, figure: str = "accuracy") -> Values:
        """A figure over one kind of question."""
        return self.values(lambda result: result.get("groups", {}).get(name, {}).get(figure))

    def any_of(self, name: str) -> Any:
        """A field that is the same for all seeds; ``None`` before any is measured."""
        return next((result.get(name) for result in self.results.values()), None)

    @property
    def state_bytes(self) -> int | None:
        """That the whole model holds at the end of one sequence."""
        return self.any_of("state_bytes")

    @property
    def is_kept(self) -> bool:
        """Whether slots stay as their first chunk left them: a control, none of ours."""
        return self.slots_averaged != self.setting

    @property
    def slots_averaged(self) -> str | None:
        """The setting, but for that."""
        return None if self.setting is None else self.setting.removesuffix(":kept")

    @property
    def label(self) -> str:
        """The model, and its slots."""
        return self.model if self.setting is None else f"{self.model}, {self.setting}"


def scores_of(suite: Suite) -> list[Score]:
    """Every planned point of every entry, measured or not, in the order of the record."""
    return [score for entry in suite.entries for score in _scores_of_entry(suite, entry)]


def _scores_of_entry(suite: Suite, entry: SuiteEntry) -> Iterable[Score]:
    pattern = entry.config.get("model", {}).get("layer_pattern", [""])
    for point in entry.points:
        results = {
            run.seed: result
            for run in entry.runs
            if run.is_measured and run.run and (result := result_at(run.run, point))
        }
        setting = next((result["setting"] for result in results.values()), point["setting"])
        yield Score(
            suite=suite.name, model=entry.name, mixer=pattern[-1], length=point["length"],
            setting=setting, changes=point["changes"], learning_rate=entry.learning_rate,
            results=results, num_planned=len(suite.seeds),
        )  # fmt: skip


def in_order(items: Iterable[Any]) -> list[Any]:
    """Each once, in order of first appearance."""
    return list(dict.fromkeys(items))
