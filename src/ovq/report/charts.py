"""Charts as Vega-Lite specifications: one definition for the page and for its PNG."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ovq.report.axes import DASHES, GREY, Axis, Style, slots_order, styles_in_order
from ovq.runs import written_beside

Record = dict[str, Any]

WIDTH, HEIGHT = 560, 300
CONFIG = {
    "font": "system-ui, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": 500, "grid": True},
    "legend": {
        "orient": "bottom", "labelFontSize": 11, "titleFontSize": 11, "labelLimit": 220,
        "symbolSize": 70, "symbolOpacity": 1, "columns": 4,
        "layout": {"bottom": {"direction": "vertical"}},
    },
    "title": {"fontSize": 14, "anchor": "start", "offset": 12},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart by the name of its file.

    Attributes:
        name: of the PNG, without its ending.
        title: what it shows.
        spec: of Vega-Lite, with its data.
        is_empty: whether nothing is measured of what it shows.
    """

    name: str
    title: str
    spec: Mapping[str, Any]
    is_empty: bool


def altair() -> Any:
    """The library that draws.

    Raises:
        ImportError: it is not installed.
    """
    try:
        importlib.import_module("vl_convert")
        return importlib.import_module("altair")
    except ImportError as error:
        raise ImportError(
            "reports need altair and vl-convert-python: pip install 'ovq[report]'"
        ) from error


def _encode(channel: str, name: str, axis: Axis) -> Any:
    """A position of a mark."""
    alt = altair()
    kind = getattr(alt, channel)
    if axis.kind == "ordinal":
        drawn = alt.Axis(labelAngle=0, grid=True, labelOverlap=True)
        return kind(f"{name}:O", title=axis.title, sort=list(axis.values), axis=drawn)
    scale: dict[str, Any] = {"type": axis.kind, "nice": False, "padding": 8}
    scale |= {"base": 2 if axis.labels else 10} if axis.kind == "log" else {"zero": False}
    if axis.domain:
        scale["domain"] = list(axis.domain)
    drawn: dict[str, Any] = {"labelExpr": axis.labels, "format": axis.format}
    if axis.values:
        drawn |= {"values": list(axis.values), "labelOverlap": False}
    else:
        drawn["tickCount"] = 5
    known = {option: value for option, value in drawn.items() if value is not None}
    return kind(f"{name}:Q", title=axis.title, scale=alt.Scale(**scale), axis=alt.Axis(**known))


def line_chart(
    name: str,
    title: str,
    records: Sequence[Record],
    *,
    x: Axis,
    y: Axis,
    styles: Mapping[str, Style],
    key: str = "model",
    trained: float | int | str | None = None,
    hover: Sequence[str] = (),
) -> Chart:
    """Lines of means, the spread as bars, values when pointed at; a click on a name shows it alone.

    Args:
        name: of the file.
        title: of the chart.
        records: with ``x``, ``mean``, ``low``, ``high``, the key, ``slots``, and fields of
            ``hover``.
        x: the horizontal axis.
        y: the vertical one.
        styles: of each key.
        key: field that tells lines apart, beside ``slots``.
        trained: where models were trained, to be marked.
        hover: fields shown when pointed at.
    """
    alt = altair()
    slots = sorted({record["slots"] for record in records}, key=slots_order)
    fields = [key, "slots"] if len(slots) > 1 else [key]
    chosen = [_click(alt, field) for field in fields]
    base = _filtered(alt, records, chosen).encode(x=_encode("X", "x", x))
    keys = [name for name in styles if any(record[key] == name for record in records)]
    colour, shape = (
        channel(f"{key}:N", scale=_scale(alt, keys, drawn), title=key)
        for channel, drawn in (
            (alt.Color, [styles[name].colour for name in keys]),
            (alt.Shape, [styles[name].shape for name in keys]),
        )
    )
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
        y=_encode("Y", "low", y), y2="high:Q", color=colour
    )
    line = base.mark_line(strokeWidth=2).encode(
        y=_encode("Y", "mean", y), color=colour, strokeDash=_dash(alt, slots), detail="slots:N",
        order="at:Q",
    )  # fmt: skip
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=_encode("Y", "mean", y), color=colour, shape=shape,
        tooltip=[*_tooltips(alt, (key, "slots")), _place(alt, x), *_tooltips(alt, hover)],
    )  # fmt: skip
    mark = [] if trained is None else _mark(alt, trained, x)
    drawn = alt.layer(*mark, spread, line.add_params(*chosen), points)
    return Chart(name=name, title=title, spec=_spec(title, drawn), is_empty=not records)


def _click(alt: Any, field: str) -> Any:
    """What is chosen by clicks on the names in a legend; every click adds a name or takes it."""
    return alt.selection_point(name=f"chosen_{field}", fields=[field], bind="legend", toggle="true")


def _filtered(alt: Any, records: Sequence[Record], chosen: Sequence[Any]) -> Any:
    """A chart without marks of the records that are chosen; all of them before any click."""
    base = alt.Chart(alt.InlineData(values=list(records)))
    for choice in chosen:
        base = base.transform_filter(choice)
    return base


def _dash(alt: Any, slots: Sequence[str]) -> Any:
    """One way to break lines for each setting, in the legend if there are several."""
    legend = alt.Legend(symbolType="stroke", symbolSize=500) if len(slots) > 1 else None
    dashes = [DASHES[index % len(DASHES)] for index in range(len(slots))]
    return alt.StrokeDash("slots:N", scale=_scale(alt, slots, dashes), title="slots", legend=legend)


def _place(alt: Any, x: Axis) -> Any:
    """Where a mark stands."""
    kind = {"field": "x", "type": "nominal"} if x.kind == "ordinal" else {
        "field": "x", "type": "quantitative", "format": ",",
    }  # fmt: skip
    return alt.Tooltip(title=x.title, **kind)


def _tooltips(alt: Any, fields: Sequence[str]) -> list[Any]:
    return [alt.Tooltip(f"{field}:N", title=field) for field in fields]


def _scale(alt: Any, names: Sequence[Any], drawn: Sequence[Any]) -> Any:
    return alt.Scale(domain=list(names), range=list(drawn))


def _mark(alt: Any, at: float | int | str, x: Axis) -> list[Any]:
    """A line where models were trained."""
    place = alt.Chart(alt.InlineData(values=[{"x": at}])).encode(x=_encode("X", "x", x))
    return [
        place.mark_rule(strokeDash=[3, 3], color=GREY),
        place.mark_text(
            align="left", baseline="bottom", dx=2, color=GREY, fontSize=11, text="trained"
        ).encode(y=alt.value(-2)),
    ]


def dot_chart(
    name: str,
    title: str,
    records: Sequence[Record],
    *,
    rows: Sequence[str],
    x: Axis,
    key: str,
    keys: Sequence[Any],
    hover: Sequence[str],
    zero: bool = False,
) -> Chart:
    """Dots of means, one row a model, one colour a key, the spread as bars.

    Args:
        name: of the file.
        title: of the chart.
        records: with ``model``, the key, ``mean``, ``low``, ``high`` and fields of ``hover``.
        rows: the models, in order.
        x: the axis of means.
        key: field that tells dots of a row apart.
        keys: its values, in order.
        hover: fields shown when pointed at.
        zero: whether a line marks nothing, for differences.
    """
    alt = altair()
    styles, choice = styles_in_order(keys), _click(alt, key)
    colours = _scale(alt, keys, [style.colour for style in styles.values()])
    shapes = _scale(alt, keys, [style.shape for style in styles.values()])
    base = _filtered(alt, records, [choice]).encode(
        y=alt.Y("model:N", sort=list(rows), title=None, scale=alt.Scale(domain=list(rows))),
        yOffset=alt.YOffset(f"{key}:N", sort=list(keys)),
        color=alt.Color(f"{key}:N", scale=colours, title=key),
    )
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(
        x=_encode("X", "low", x), x2="high:Q"
    )
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(
        x=_encode("X", "mean", x),
        shape=alt.Shape(f"{key}:N", scale=shapes, title=key),
        tooltip=_tooltips(alt, ("model", key, *hover)),
    )
    layers = [spread, dots.add_params(choice)]
    if zero:
        nothing = alt.Chart(alt.InlineData(values=[{"x": 0}])).mark_rule(color=GREY)
        layers.insert(0, nothing.encode(x="x:Q"))
    spec = _spec(title, alt.layer(*layers), height=60 + 30 * len(rows))
    return Chart(name=name, title=title, spec=spec, is_empty=not records)


def _spec(title: str, drawn: Any, height: int = HEIGHT) -> dict[str, Any]:
    sized = drawn.properties(title=title, width=WIDTH, height=height, background="white")
    return sized.to_dict() | {"config": CONFIG}


def schema_version() -> str:
    """Of Vega-Lite, as vl-convert names it, such as ``6.4``."""
    return ".".join(altair().SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def save_png(chart: Chart, path: Path) -> None:
    """Write a chart as a PNG, beside its place first, then renamed onto it."""
    altair()
    import vl_convert

    with written_beside(path) as beside:
        beside.write_bytes(
            vl_convert.vegalite_to_png(dict(chart.spec), vl_version=schema_version(), scale=2)
        )
