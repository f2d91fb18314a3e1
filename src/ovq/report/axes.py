"""Axes, colours and shapes: what charts are described with, before any library draws them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ovq.report.figures import COLOURS

NO_SLOTS = "none"
GREY = "#8a8a8a"  # in place of black: seen on white and on black paper
PALETTE = (*COLOURS[:-1], GREY)
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right",
          "triangle-left")  # fmt: skip
DASHES = ([1, 0], [6, 3], [2, 2], [10, 3], [10, 3, 2, 3], [4, 1], [1, 3], [12, 6])
# Lengths as 512, 2k and 64k: there is no room for all digits on a phone.
LENGTHS = "datum.value >= 1024 ? datum.value / 1024 + 'k' : datum.value"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows.

    Attributes:
        title: beside it.
        kind: ``linear``, ``log`` or ``ordinal``.
        values: its ticks; of an ordinal axis all it has, in order.
        domain: from where to where.
        labels: an expression for the text of a tick.
        format: of a tick's number.
    """

    title: str
    kind: str = "linear"
    values: Sequence[Any] = ()
    domain: tuple[float, float] | None = None
    labels: str | None = None
    format: str | None = None


@dataclass(frozen=True)
class Style:
    """How a line is drawn."""

    colour: str
    shape: str


ACCURACY = Axis(title="accuracy", domain=(0.0, 1.0), format=".1f")


def log_axis(title: str, values: Iterable[float | int], format: str = "~g") -> Axis:
    """A logarithmic axis with ticks at 1, 2, 5, 10 and so on, at tens alone where those are many.

    >>> log_axis("ratio", [0.3, 4.0]).values
    [0.2, 0.5, 1.0, 2.0, 5.0]
    """
    known = [float(value) for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps = (1, 2, 5) if high - low < 3 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    below = [tick for tick in ticks if tick <= min(known)] or ticks[:1]
    above = [tick for tick in ticks if tick >= max(known)] or ticks[-1:]
    shown = [tick for tick in ticks if below[-1] <= tick <= above[0]]
    return Axis(title=title, kind="log", values=shown, format=format, domain=(shown[0], shown[-1]))


def lengths_axis(lengths: Sequence[int], title: str = "context length, tokens") -> Axis:
    """Lengths by powers of two."""
    return Axis(title=title, kind="log", values=sorted(set(lengths)), labels=LENGTHS)


def slots_order(setting: str) -> tuple[int, float, str]:
    """Few slots before many: none, shares of bytes, fractions of the context, numbers, the rest.

    >>> sorted(["T/2", "64", "25%", "none", "10%:T/128", "10%", "T/16"], key=slots_order)
    ['none', '10%', '10%:T/128', '25%', 'T/16', 'T/2', '64']
    """
    slots, _, chunk = setting.partition(":")
    if slots.endswith("%"):
        return 1, float(slots[:-1]), chunk
    if slots.startswith("T/"):
        return 2, -float(slots[2:]), chunk
    if slots.isdecimal():
        return 3, float(slots), chunk
    return 0 if setting in ("", NO_SLOTS) else 4, 0.0, chunk


def styles_in_order(names: Sequence[Any]) -> dict[Any, Style]:
    """Colours and shapes by place."""
    return {
        name: Style(PALETTE[index % len(PALETTE)], SHAPES[index % len(SHAPES)])
        for index, name in enumerate(names)
    }
