"""Pictures with matplotlib, and the colours that all pictures share."""

from pathlib import Path
from typing import Any

from ovq.runs import written_beside

# Distinct in print and for colour-blind readers. Source: Okabe and Ito, "Color Universal Design".
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dvx+"


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'ovq[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as a PNG, beside its place first, then renamed onto it."""
    with written_beside(path) as beside:
        figure.savefig(beside, format="png", dpi=150)
