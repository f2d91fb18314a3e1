"""One page with everything in it: it loads from a disk, asks for nothing, and draws itself."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ovq.report.charts import altair, schema_version
from ovq.report.goals import MET, MISSED
from ovq.report.sections import Section

TEMPLATE = Path(__file__).with_name("page.html")
SCRIPT = Path(__file__).with_name("page.js")
LONG = 24  # characters of a cell from which on its text is broken into lines


@lru_cache(maxsize=1)
def chart_library() -> str:
    """The script that draws charts: Vega, Vega-Lite and Vega-Embed in one."""
    altair()
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", schema_version())


def render(sections: Sequence[Section], *, version: str, command: str | None) -> str:
    """The page: one HTML document.

    Its policy lets the scripts in it run and forbids every request; expressions of charts are
    interpreted, so that nothing is evaluated as code.

    Args:
        sections: in order.
        version: of this package.
        command: that made it, if known.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    charts = {chart.name: chart.spec for section in sections for chart in section.charts}
    script = SCRIPT.read_text(encoding="utf-8")
    bundle = chart_library() if charts else ""
    # No text of a run file can end the element that holds the data.
    specs = json.dumps(charts, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    scripts: dict[str, Any] = {
        "specs": Markup(specs), "bundle": Markup(bundle), "script": Markup(script),
        "hashes": Markup(" ".join(_policy(text) for text in (bundle, script) if text)),
    }  # fmt: skip
    return template.render(
        sections=sections, version=version, command=command, cell_class=_cell_class, **scripts
    )


def _policy(script: str) -> str:
    """What lets a script run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _cell_class(text: str) -> str:
    for verdict in (MET, MISSED):
        if text == verdict or text.startswith(f"{verdict} so far"):
            return verdict
    return "words" if len(text) > LONG else ""
