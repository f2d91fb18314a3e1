"""Tables: as values that a page sorts, and as Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ovq.report.scores import Values


@dataclass(frozen=True)
class Cell:
    """What stands in a place of a table.

    Attributes:
        text: as shown.
        value: to sort by; text without one is sorted as text.
        more: shown when pointed at.
    """

    text: str
    value: float | int | None = None
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells below a head.

    Attributes:
        head: names of the columns.
        rows: as many cells each.
        caption: what it shows.
        is_open: whether a page shows it unasked.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str
    is_open: bool = True

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers."""
        return tuple(any(cell.value is not None for cell in column) for column in self.columns)

    @property
    def columns(self) -> tuple[tuple[Cell, ...], ...]:
        """The cells by column."""
        return tuple(zip(*self.rows, strict=True)) if self.rows else ((),) * len(self.head)

    def markdown(self) -> str:
        """The table alone."""
        rows = [[cell.text.replace("|", "\\|") for cell in row] for row in self.rows]
        return markdown_table(self.head, rows, self.numeric)


def cell_of(values: Values, digits: int = 3) -> Cell:
    """Mean and spread over seeds; each seed when pointed at."""

    def form(value: float) -> str:
        return f"{value:.{digits}f}"

    return Cell(values.text(form), values.mean, values.each(form))


def number(value: float | None) -> str:
    """A metric as text; run files hold no NaN but null."""
    return "nan" if value is None else f"{value:.3f}"


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[bool] = ()
) -> str:
    """A Markdown table.

    Args:
        head: names of the columns.
        rows: of cells.
        numeric: which columns are numbers; all but the first by default.
    """
    right = tuple(numeric) or (False,) + (True,) * (len(head) - 1)
    rule = "|" + "|".join("---:" if is_number else "---" for is_number in right) + "|"
    lines = ["| " + " | ".join(head) + " |", rule]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
