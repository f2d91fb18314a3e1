"""What stands before the questions: which runs there are, and which goals are reached."""

from collections.abc import Iterable, Sequence

from ovq.report.goals import Verdict, verdicts
from ovq.report.records import STATUSES, Suite
from ovq.report.scores import scores_of
from ovq.report.sections.base import SLOTS, Section, trained_task
from ovq.report.tables import Cell, Table

NO_CELLS = (Cell(""), Cell(""))  # of what a record would tell


def status(suites: Sequence[Suite], known: Iterable[str] = ()) -> Section:
    """What is done and what is not, and how the runs were made.

    Args:
        suites: of the report.
        known: names of all suites there are; those without a record are said to have none.
    """
    notes = (
        "Each entry is trained at every learning rate on the first seed; the smallest loss on "
        "validation data decides, and that rate is used for all seeds. Statuses are those of the "
        "run files as they are now.",
    )
    return Section(
        name="status", title="Status", question="What is done, and what is missing?", notes=notes,
        tables=(_counts_table(suites, known), _origins_table(suites)),
    )  # fmt: skip


def _counts_table(suites: Sequence[Suite], known: Iterable[str]) -> Table:
    rows = []
    for suite in suites:
        rates = ", ".join(f"{rate:g}" for rate in suite.record["learning_rates"])
        counts = (Cell(str(suite.counts[status]), suite.counts[status]) for status in STATUSES)
        told = (suite.record["scale"], ", ".join(map(str, suite.seeds)), rates)
        rows.append((Cell(suite.name), *counts, *map(Cell, told)))
    head = ("suite", *STATUSES, "scale", "seeds", "learning rates")
    for name in known:
        if name not in {suite.name for suite in suites}:
            rows.append((Cell(name), *(Cell("") for _ in STATUSES), Cell("no record"), *NO_CELLS))
    return Table(head=head, rows=tuple(rows), caption="Runs by status")


def _origins_table(suites: Sequence[Suite]) -> Table:
    rows = []
    for suite in suites:
        record = suite.record
        versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
        made = (record.get("command") or "", str(record.get("device", "")), versions)
        rows.append((Cell(suite.name), *map(Cell, made)))
    head = ("suite", "command", "device", "versions")
    return Table(head=head, rows=tuple(rows), caption="How they were made", is_open=False)


def goals(suites: Sequence[Suite]) -> Section:
    """The project's goals against what was measured."""
    scores = [score for suite in suites for score in scores_of(suite)]
    found = verdicts(scores, {suite.name: trained_task(suite) for suite in suites})
    notes = (
        SLOTS,
        "Means over the seeds that both have. Goals count where full attention reaches 0.95 "
        "itself (without positions, or with them where that was trained too and is better); in "
        "regression, where its error is at most twice that of least squares per function and half "
        "that of pooled least squares. Each form of OVQ attention has its verdict: `ovq`, the "
        "paper's rule `ovq_paper`, and either with longer chunks at test time, where those "
        "differ; recall at the most slots that keep to the bytes, regression at each setting, "
        "whatever its bytes. What is kept of A is told of the score above guessing, against the "
        "dense state that has the best score in the end. All seeds answer the same questions: ± "
        "is the spread of trainings.",
    )
    tables = (
        _goals_table([v for v in found if v.is_goal], "Goals and verdicts"),
        _goals_table([v for v in found if not v.is_goal], "The same at shorter lengths"),
    )
    return Section(
        name="goals", title="Goals", question="Which goals are reached here?", notes=notes,
        tables=tuple(table for table in tables if table.rows),
    )  # fmt: skip


def _goals_table(found: Sequence[Verdict], caption: str) -> Table:
    rows = tuple(tuple(map(Cell, (v.goal, v.text, v.at, v.measured, v.baseline))) for v in found)
    head = ("what is asked", "verdict", "at", "measured", "against")
    return Table(head=head, rows=rows, caption=caption, is_open=any(v.is_goal for v in found))
