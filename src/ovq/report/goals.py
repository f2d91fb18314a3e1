"""The project's goals, and whether what was measured reaches them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovq.report.scores import Score, Values

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
    """

    goal: str
    at: str
    is_goal: bool = True
    baseline: str = ""
    measured: str = ""
    verdict: str = NOT_MEASURED


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
    for score in scores:
        by_suite.setdefault(score.suite, []).append(score)
    return [
        *(v for suite in ("recall", "positional") for v in _recall(suite, by_suite.get(suite, []))),
        *_regression(by_suite.get("regression", []), told.get("regression", {})),
        _forgetting(by_suite.get("forgetting", []), told.get("forgetting", {}).get("first_length")),
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
            if found.is_goal or found.measured:
                yield found


def _recall_at(
    goal: str, length: int, scores: Sequence[Score], share: float, wanted: float
) -> Verdict:
    asked: dict[str, Any] = {
        "goal": goal,
        "at": f"{length:,} tokens",
        "is_goal": length == GOAL_LENGTH,
    }
    full = _best(score for score in scores if score.model in FULL)
    if full is None:
        return Verdict(**asked)
    limit = share * (full.state_bytes or 0)
    ours = _best(s for s in scores if s.model in OVQ and (s.state_bytes or limit + 1) <= limit)
    if ours is None:
        return Verdict(**asked, baseline=f"{full.model} {full.accuracy}")
    full_accuracy = full.accuracy.shared_with(ours.accuracy)
    accuracy = ours.accuracy.shared_with(full.accuracy)
    baseline = f"{full.model} {full_accuracy}"
    of_full, own = full_accuracy.mean, accuracy.mean
    if of_full is None or own is None:
        return Verdict(**asked, baseline=baseline)
    held = (ours.state_bytes or 0) / (full.state_bytes or 1)
    measured = f"{ours.label}: {accuracy}, {own / max(of_full, 1e-9):.3f} of it with {held:.1%}"
    verdict = _judge(of_full >= LEARNED, own >= wanted * of_full)
    return Verdict(**asked, baseline=baseline, measured=measured, verdict=verdict)


def _best(scores: Iterable[Score]) -> Score | None:
    """That with the highest mean; ``None`` if none is measured."""
    measured = [score for score in scores if score.accuracy.mean is not None]
    return max(measured, key=lambda score: score.accuracy.mean or 0.0, default=None)


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
        measured=f"{score.label}: {found}, {own / max(error, 1e-9):.3f} of it",
        verdict=_judge(learned, own <= 1.05 * error),
    )


def kept(scores: Sequence[Score], model: str, before: int, after: int) -> Values | None:
    """The share of its score on A that a model keeps, by seed."""
    found = {s.length: s for s in scores if s.model == model and s.length in (before, after)}
    if len(found) < 2:
        return None
    first, last = (found[length].group("A").by_seed for length in (before, after))
    shares = {seed: last[seed] / first[seed] for seed in last if first.get(seed)}
    return Values(by_seed=shares, num_planned=found[after].num_planned) if shares else None


def _forgetting(scores: Sequence[Score], first_length: int | None) -> Verdict:
    goal = f"forgetting: OVQ keeps {KEPT:.0%} of its score on A, the best dense state less"
    at = f"n = {TIMES_FORGOTTEN} lengths of A"
    if first_length is None:
        return Verdict(goal=goal, at=at)
    before, after = first_length, (1 + TIMES_FORGOTTEN) * first_length
    found = {model: kept(scores, model, before, after) for model in (*OVQ, *DENSE_STATES)}
    shares = {model: values.mean for model, values in found.items() if values and values.mean}
    ours = max((m for m in OVQ if m in shares), key=lambda m: shares[m], default=None)
    dense = max((m for m in DENSE_STATES if m in shares), key=lambda m: shares[m], default=None)
    full = [s.group("A").mean or 0.0 for s in scores if s.model in FULL and s.length == after]
    if ours is None or dense is None or not full:
        return Verdict(goal=goal, at=at)
    reached = shares[ours] >= KEPT and shares[dense] < KEPT
    return Verdict(
        goal=goal, at=at,
        baseline=f"{dense} keeps {found[dense]}; full attention's score {max(full):.3f}",
        measured=f"{ours} keeps {found[ours]}",
        verdict=_judge(max(full) >= LEARNED, reached),
    )  # fmt: skip
