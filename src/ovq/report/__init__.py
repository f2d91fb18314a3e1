"""Tables, pictures and one page, from run files and records alone."""

from ovq.report.figures import COLOURS, MARKERS, new_figure, save_figure
from ovq.report.run_table import COLUMNS, cells, markdown, read_results, run_labels
from ovq.report.tables import markdown_table, number
from ovq.report.write import report

__all__ = [
    "COLOURS",
    "COLUMNS",
    "MARKERS",
    "cells",
    "markdown",
    "markdown_table",
    "new_figure",
    "number",
    "read_results",
    "report",
    "run_labels",
    "save_figure",
]
