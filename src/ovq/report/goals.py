"""The project's goals, and whether what was measured reaches them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ovq.report.scores import Score, Values, in_order

MET, MISSED = "met", "missed"
NOT_LEARNED, NOT_MEASURED = "baseline not learned", "not measured"

GOAL_LENGTH = 65_536
THIN = 32  # tokens a pair
SHARES = {0.25: 0.97, 0.10: 0.90}  # of full attention's state, and of its accuracy
LEARNED = 0.95  # full attention's accuracy where goals count
FULL = ("full_attention_nope", "full_attention")
OVQ = ("ovq", "ovq_paper")
DENSE_STATES = ("linear_attention", "gated_delta_net", "mamba2")
FUNCTIONS = 128
TIMES_FORGOTTEN = 16  # tokens since A, in lengths of A
KEPT = 0.90


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one goal came to.

    Attributes:
        goal: in words.
        at: where it is asked.
        is_goal: whether it is asked there, or shown on the way.
        baseline: what it is measured against, in words.
        measured: what ours was, in words.
        verdict: one of the four.
        seeds: that it rests on, and those planned; ``None`` before there are any.
    """

    goal: str
    at: str
    is_goal: bool = True
    baseline: str = ""
    measured: str = ""
    verdict: str = NOT_MEASURED
    seeds: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """The verdict, with its seeds while some lack."""
        if self.seeds is None or self.seeds[0] >= self.seeds[1]:
            return self.verdict
        return f"{self.verdict} so far, {self.seeds[0]} of {self.seeds[1]} seeds"


def _seeds(*values: Values) -> tuple[int, int]:
    """Those that all of them have, and those planned."""
    common = set.intersection(*(set(found.by_seed) for found in values))
    return len(common), max(found.num_planned for found in values)


def verdicts(
    scores: Iterable[Score], tasks: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Verdict]:
    """What all goals came to.

    Args:
        scores: of all suites.
        tasks: what was trained, by suite, as in the run files; those of suites with no run are
            empty or left out.
    """
    told = tasks or {}
    by_suite: dict[str, list[Score]] = {}
    for score in (score for score in scores if not score.is_kept):
        by_suite.setdefault(score.suite, []).append(score)
    return [
        *(v for suite in ("recall", "positional") for v in _recall(suite, by_suite.get(suite, []))),
        *_regression(by_suite.get("regression", []), told.get("regression", {})),
        *_forgetting(by_suite.get("forgetting", []), told.get("forgetting", {})),
    ]


def _recall(suite: str, scores: Sequence[Score]) -> Iterator[Verdict]:
    """Recall at the length that the goal is asked at, and at all that are measured."""
    thin = [score for score in scores if score.changes.get("tokens_per_pair") == THIN]
    lengths = {score.length for score in thin if score.results} | {GOAL_LENGTH}
    for share, wanted in SHARES.items():
        for length in sorted(lengths, reverse=True):
            of_length = [score for score in thin if score.length == length]
            goal = (
                f"{suite}: {wanted:.0%} of full attention's accuracy with {share:.0%} of its state"
            )
            found = _recall_at(goal, length, of_length, share, wanted)
            yield from (one for one in found if one.is_goal or one.measured)


def _recall_at(
    goal: str, length: int, scores: Sequence[Score], share: float, wanted: float
) -> Iterator[Verdict]:
    """A verdict on each form of ours, at the most slots that keep to the bytes.

    Longer chunks that are no longer than in training are the same form, told once.
    """
    asked: dict[str, Any] = {
        "goal": goal,
        "at": f"{length:,} tokens",
        "is_goal": length == GOAL_LENGTH,
    }
    full = _best(score for score in scores if score.model in FULL)
    if full is None:
        yield Verdict(**asked)
        return
    limit = share * (full.state_bytes or 0)
    within = [s for s in scores if (s.state_bytes or limit + 1) <= limit]
    largest = [_largest(s for s in within if _form(s) == form) for form in _forms(within)]
    distinct: dict[tuple, Score] = {}
    for score in largest:
        if score is not None:
            loss = score.values(lambda result: result["loss"])
            found = (score.model, score.state_bytes, str(score.accuracy.by_seed), str(loss.by_seed))
            distinct.setdefault(found, score)
    ours = distinct.values()
    if not ours:
        yield Verdict(**asked, baseline=f"{full.model} {full.accuracy}")
    yield from (_recall_of(asked, score, full, wanted) for score in ours)


def _form(score: Score) -> tuple[str, str]:
    """What of a dictionary is not its number of slots: how it was trained, chunks at test time."""
    return score.model, (score.setting or "").partition(":")[2]


def _forms(scores: Iterable[Score]) -> list[tuple[str, str]]:
    return in_order(_form(score) for score in scores if score.model in OVQ)


def _recall_of(asked: dict[str, Any], ours: Score, full: Score, wanted: float) -> Verdict:
    """What one setting of ours is against full attention, over the seeds that both have."""
    full_accuracy = full.accuracy.shared_with(ours.accuracy)
    accuracy = ours.accuracy.shared_with(full.accuracy)
    baseline = f"{full.model} {full_accuracy}"
    of_full, own = full_accuracy.mean, accuracy.mean
    if of_full is None or own is None:
        return Verdict(**asked, baseline=baseline)
    return Verdict(
        **asked,
        baseline=baseline,
        measured=f"{ours.label}: {accuracy}, {own / max(of_full, 1e-9):.3f} of it"
        f"{_held(ours, full)}",
        verdict=_judge(of_full >= LEARNED, own >= wanted * of_full),
        seeds=_seeds(full_accuracy, accuracy),
    )


def _best(scores: Iterable[Score]) -> Score | None:
    """That with the highest mean; ``None`` if none is measured."""
    measured = [score for score in scores if score.accuracy.mean is not None]
    return max(measured, key=lambda score: score.accuracy.mean or 0.0, default=None)


def _largest(scores: Iterable[Score]) -> Score | None:
    """That with the largest state; ``None`` if none is measured."""
    measured = [score for score in scores if score.accuracy.mean is not None]
    return max(measured, key=lambda score: score.state_bytes or 0, default=None)


def _held(score: Score, base: Score) -> str:
    """The share of the baseline's state, in words; empty where it is not known."""
    if score.state_bytes is None or not base.state_bytes:
        return ""
    return f" with {score.state_bytes / base.state_bytes:.1%}"


def _judge(learned: bool, reached: bool) -> str:
    return (MET if reached else MISSED) if learned else NOT_LEARNED


def late_error(score: Score, earlier: int, oracle: str | None = None) -> Values:
    """Squared error over questions after so many examples of their function, or more.

    Args:
        score: of regression.
        earlier: examples.
        oracle: a solver, in place of the model.
    """

    def pick(result):
        late = [
            group
            for name, group in result.get("groups", {}).items()
            if int(name.split()[0].split("-")[0]) >= earlier
        ]
        asked = sum(group["asked"] for group in late)
        errors = [g["loss"] if oracle is None else g.get("oracles", {}).get(oracle) for g in late]
        if not asked or None in errors:
            return None
        return sum(g["asked"] * error for g, error in zip(late, errors, strict=True)) / asked

    return score.values(pick)


def _regression(scores: Sequence[Score], task: Mapping[str, Any]) -> Iterator[Verdict]:
    """One verdict a setting of ours.

    Compared are errors after two examples more than a function has numbers: with fewer, the error
    of least squares has no mean where there is noise.
    """
    earlier = task.get("num_features", 0) + 2
    at = f"after {earlier} examples or more"
    goal = f"regression: error within 5% of full attention's, {FUNCTIONS} functions"
    most = [s for s in scores if s.changes.get("num_functions") == FUNCTIONS]
    errors = [(score, late_error(score, earlier)) for score in most]
    measured = [(score, found, found.mean) for score, found in errors if found.mean is not None]
    full = [one for one in measured if one[0].model in FULL]
    ours = [one for one in measured if one[0].model in OVQ]
    if not full or not ours:
        yield Verdict(goal=goal, at=at if task else "")
        return
    base, base_errors, _ = min(full, key=lambda one: one[2])
    for score, found, _ in ours:
        yield _regression_of(goal, at, score, found.shared_with(base_errors), base, earlier)


def _regression_of(
    goal: str, at: str, score: Score, found: Values, base: Score, earlier: int
) -> Verdict:
    """What the errors found of one setting of ours are against full attention's, over its seeds."""
    asked: dict[str, Any] = {"goal": goal, "at": f"{score.length:,} tokens, {at}"}
    of_base, solved, pooled = (
        late_error(base, earlier, name).shared_with(found)
        for name in (None, "least_squares", "pooled_least_squares")
    )
    baseline = f"{base.model} {of_base}; least squares {solved}, pooled {pooled}"
    own, error = found.mean, of_base.mean
    if own is None or error is None:
        return Verdict(**asked, baseline=baseline)
    learned = error <= 2 * (solved.mean or 0.0) and error <= (pooled.mean or 0.0) / 2
    return Verdict(
        **asked,
        baseline=baseline,
        measured=f"{score.label}: {found}, {own / max(error, 1e-9):.3f} of it{_held(score, base)}",
        verdict=_judge(learned, own <= 1.05 * error),
        seeds=_seeds(found, of_base),
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a model keeps of A.

    Attributes:
        model: its name.
        first: its score on A right after it.
        last: its score on A in the end.
        chance: the score of guessing.
    """

    model: str
    first: Values
    last: Values
    chance: float

    @property
    def has_learned(self) -> bool:
        """Whether the first score is at least twice that of guessing."""
        return (self.first.mean or 0.0) >= max(2 * self.chance, 1e-9)

    @property
    def share(self) -> Values:
        """Of the score above that of guessing, by seed."""
        above = {
            seed: (self.last.by_seed[seed] - self.chance) / max(first - self.chance, 1e-9)
            for seed, first in self.first.by_seed.items()
            if seed in self.last.by_seed
        }
        return Values(by_seed=above, num_planned=self.last.num_planned)

    def shared_with(self, other: "Kept") -> "Kept":
        """The same of the seeds that another has, too."""
        first, last = (
            own.shared_with(of.first).shared_with(of.last)
            for own, of in ((self.first, other), (self.last, other))
        )
        return replace(self, first=first, last=last)

    def __str__(self) -> str:
        return f"{self.model} keeps {self.share}: {self.first.mean:.3f} to {self.last.mean:.3f}"


def kept(
    scores: Sequence[Score], model: str, before: int, after: int, chance: float
) -> Kept | None:
    """What a model keeps of A from one length to another; ``None`` before both are measured."""
    found = {s.length: s.group("A") for s in scores if s.model == model}
    first, last = (found.get(length) for length in (before, after))
    if first is None or last is None or not first.shared_with(last).by_seed:
        return None
    return Kept(
        model=model, first=first.shared_with(last), last=last.shared_with(first), chance=chance
    )


def _forgetting(scores: Sequence[Score], task: Mapping[str, Any]) -> Iterator[Verdict]:
    """One verdict a form of ours, against the dense state with the best score in the end."""
    goal = f"forgetting: OVQ keeps {KEPT:.0%} of its score on A, the best dense state less"
    asked: dict[str, Any] = {"goal": goal, "at": f"n = {TIMES_FORGOTTEN} lengths of A"}
    if not task:
        yield Verdict(**asked)
        return
    before = task["first_length"]
    after, chance = (1 + TIMES_FORGOTTEN) * before, 1 / task["num_values"]

    def of(models: Iterable[str]) -> list[Kept]:
        found = [kept(scores, model, before, after, chance) for model in models]
        return [one for one in found if one is not None]

    dense = max(of(DENSE_STATES), key=lambda one: one.last.mean or 0.0, default=None)
    full = [s.group("A").mean or 0.0 for s in scores if s.model in FULL and s.length == after]
    ours = of(OVQ)
    if not ours or dense is None or not full:
        yield Verdict(**asked)
        return
    yield from (_forgetting_of(asked, one, dense, max(full)) for one in ours)


def _forgetting_of(asked: dict[str, Any], ours: Kept, dense: Kept, full: float) -> Verdict:
    """What one form of ours keeps against a dense state, over the seeds that both have."""
    ours, dense = ours.shared_with(dense), dense.shared_with(ours)
    own, others = ours.share.mean, dense.share.mean
    if own is None or others is None:  # no seed of both
        return Verdict(**asked)
    return Verdict(
        **asked,
        baseline=f"{dense}; full attention's score {full:.3f}; guessing {ours.chance:.3f}",
        measured=str(ours),
        verdict=_judge(
            full >= LEARNED and dense.has_learned,
            ours.has_learned and own >= KEPT and others < KEPT,
        ),
        seeds=_seeds(ours.share, dense.share),
    )
