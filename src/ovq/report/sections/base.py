"""What a section of the page is, and what all of them are made with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovq.report.axes import NO_SLOTS, PALETTE, SHAPES, Style, slots_order
from ovq.report.charts import Chart, Record
from ovq.report.records import Suite
from ovq.report.scores import Score, Values, in_order, scores_of
from ovq.report.tables import Cell, Table, cell_of

# Mixers of one kind share a colour; their shapes differ. All others, a colour of their own kind.
FAMILIES = (
    ("ovq", "windowed_ovq"),
    ("full_attention", "full_attention_nope"),
    ("gated_delta_net",),
    ("mamba2",),
    ("linear_attention", "linear_attention_normalized"),
    ("vq", "vq_static_values"),
    ("sliding_window", "sliding_window_sinks"),
    (),
)
COLOURS_OF_FAMILIES = (*PALETTE, "#8c564b")
Placed = tuple[Score, Any]  # a score, and its place on an axis or in a table
Pick = Callable[[Score, Any], Values]  # the figure of a score at that place
SOFTMAX = ("initial_beta", "ssmax_length")
# Fields of the model that a mixer reads, but for widths.
MODEL_FIELDS: dict[str, tuple[str, ...]] = {
    "ovq": ("dictionary", *SOFTMAX, "use_short_conv"),
    "vq": ("num_codes", "block_size", "straight_through", *SOFTMAX, "use_short_conv"),
    "full_attention": ("ssmax_length",),
    "full_attention_nope": ("ssmax_length",),
    "gated_delta_net": ("initial_decay_rate",),
    "mamba2": ("initial_decay_rate", "ssm_state_size"),
    "sliding_window": ("window_size",),
}
GUESSING = (
    "Guessing among all values is right in 1 of {}. Who names some value of the context, "
    "whosever it is, is right in more of few pairs, and in more still by leaving out values "
    "already asked for: low scores over few pairs bind nothing."
)
SLOTS = (
    "Slots are those at test time, without retraining: `25%` is as many as a quarter of full "
    "attention's bytes after context and questions can hold, `T/4` a quarter of a slot a token of "
    "the context T. After a colon stand the chunks, if not those of training: `25%:T/128`. "
    "`:kept` is a control without running means: every slot stays as its first chunk left it, and "
    "what joins later is counted alone."
)
GAINED = "What running means change, against slots that stay as their first chunk left them:"
HOVER = ("value", "seeds", "state", "learning rate")
SPREAD = (
    "Lines are means over seeds, bars reach from the smallest to the largest seed; in tables ± is "
    "the largest distance of a seed from the mean."
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A question, with its charts and tables.

    Attributes:
        name: by which it is linked.
        title: of the section.
        question: that it answers.
        notes: what a reader has to know.
        incomplete: what is missing, unfinished or failed, one line an entry.
        charts: those with anything to draw.
        tables: what the charts show, in numbers.
    """

    name: str
    title: str
    question: str
    notes: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


def make_section(
    suite: Suite,
    title: str,
    notes: Sequence[str],
    charts: Iterable[Chart],
    tables: Iterable[Table],
) -> Section:
    """The section of a suite; without any measurement it says so, and has no chart."""
    is_empty = not any(score.results for score in scores_of(suite))
    return Section(
        name=suite.name,
        title=title,
        question=suite.record["question"],
        notes=("Nothing is measured yet.",) if is_empty else (*notes, SPREAD),
        incomplete=tuple(incomplete(suite)),
        charts=() if is_empty else with_data(charts),
        tables=(*tables, models_table(suite)),
    )


def models_table(suite: Suite) -> Table:
    """What is trained: fields of each entry's model; closed until it is asked for."""
    rows = []
    for entry in suite.entries:
        model, training = (entry.config.get(part, {}) for part in ("model", "training"))
        mixer = model.get("layer_pattern", [""])[-1]
        own = {name: model[name] for name in MODEL_FIELDS.get(mixer, ()) if name in model}
        told = own.pop("dictionary", {}) | own
        fields = ", ".join(f"{name} {value}" for name, value in told.items())
        steps = training.get("num_steps")
        rows.append((Cell(entry.name), Cell(mixer), Cell(fields), Cell(str(steps or ""), steps)))
    head = ("model", "mixer", "of its own", "steps")
    return Table(head=head, rows=tuple(rows), caption="Models as trained", is_open=False)


def with_data(charts: Iterable[Chart]) -> tuple[Chart, ...]:
    """Without those that nothing is measured of."""
    return tuple(chart for chart in charts if not chart.is_empty)


def incomplete(suite: Suite) -> Iterable[str]:
    """One line for each entry that has runs which are not done."""
    for entry in suite.entries:
        open_runs = [run for run in entry.runs if run.status != "done"]
        if not open_runs:
            continue
        found = [run.status for run in open_runs]
        told = ", ".join(f"{found.count(status)} {status}" for status in in_order(found))
        reasons = in_order(f"{run.folder}: {run.reason}" for run in open_runs if run.reason)
        why = "".join(f"; {reason}" for reason in reasons)
        yield f"{entry.name}: {told}, of {len(entry.runs)} runs{why}"


def styles_of(scores: Iterable[Score]) -> dict[str, Style]:
    """A style for each model, by its mixer's colour."""
    return styles_of_mixers({score.model: score.mixer or score.model for score in scores})


def styles_of_mixers(mixers: Mapping[str, str]) -> dict[str, Style]:
    """The same, from the mixer of each model by name."""
    found: dict[str, Style] = {}
    used = [0] * len(FAMILIES)
    for model, mixer in mixers.items():
        family = next((i for i, names in enumerate(FAMILIES) if mixer in names), len(FAMILIES) - 1)
        shape = SHAPES[(family + used[family]) % len(SHAPES)]
        found[model] = Style(COLOURS_OF_FAMILIES[family], shape)
        used[family] += 1
    return found


def slots_of(score: Score) -> str:
    """The setting, as a legend has it."""
    return NO_SLOTS if score.setting is None else score.setting


def record_of(
    score: Score, x: Any, values: Values, at: float | int, digits: int = 3
) -> Record | None:
    """A point of a line; ``None`` without a measured seed."""
    if values.mean is None:
        return None
    state, rate = score.state_bytes, score.learning_rate
    return {
        "model": score.model, "slots": slots_of(score), "x": x, "at": at,
        "mean": values.mean, "low": values.low, "high": values.high,
        "value": str(values), "seeds": values.each(),
        "state": "" if state is None else f"{state:,} bytes",
        "learning rate": "" if rate is None else f"{rate:g}",
    }  # fmt: skip


def records_of(places: Iterable[Placed], pick: Pick, order: Sequence[Any] = ()) -> list[Record]:
    """The points of a chart, without those that nothing is measured of.

    Args:
        places: scores, each with its place on the horizontal axis.
        pick: the figure.
        order: all places in order, where they are names.
    """
    found = []
    for score, x in sorted(places, key=lambda placed: placed[0].setting is not None):
        found.append(record_of(score, x, pick(score, x), order.index(x) if order else x))
    return [record for record in found if record is not None]


def wide_table(
    caption: str,
    places: Iterable[Placed],
    columns: Mapping[Any, str],
    pick: Pick,
    digits: int = 3,
) -> Table:
    """One row a model and setting, one column a place.

    Args:
        caption: of the table.
        places: scores, each with the column that it stands in.
        columns: titles, in order.
        pick: the figure.
        digits: after the point.
    """
    by_row: dict[tuple[str, str], dict[Any, Score]] = {}
    for score, place in places:
        by_row.setdefault((score.model, slots_of(score)), {})[place] = score
    rows = []
    models = in_order(model for model, _ in by_row)
    ordered = sorted(by_row, key=lambda row: (models.index(row[0]), slots_order(row[1])))
    for model, slots in ordered:
        found = by_row[model, slots]
        rate = next(iter(found.values())).learning_rate
        row = [Cell(model), Cell(slots), Cell("" if rate is None else f"{rate:g}", rate)]
        row += [cell_of(pick(found[c], c), digits) if c in found else Cell("") for c in columns]
        rows.append(tuple(row))
    head = ("model", "slots", "rate", *columns.values())
    return Table(head=head, rows=tuple(rows), caption=caption)


def state_table(caption: str, places: Sequence[Placed], columns: Mapping[Any, str]) -> Table:
    """Bytes of state, also as a share of full attention's; closed until it is asked for."""
    known = [(score, x) for score, x in places if score.state_bytes is not None]
    full = {x: score.state_bytes for score, x in known if is_full_attention(score)}
    by_row: dict[tuple[str, str], dict[Any, Cell]] = {}
    for score, place in places:
        held, of = score.state_bytes, full.get(place)
        share = f" ({held / of:.0%})" if held and of else ""
        cell = Cell("" if held is None else f"{held:,}{share}", held)
        by_row.setdefault((score.model, slots_of(score)), {})[place] = cell
    rows = tuple(
        (Cell(model), Cell(slots), *(found.get(place, Cell("")) for place in columns))
        for (model, slots), found in by_row.items()
    )
    head = ("model", "slots", *columns.values())
    return Table(head=head, rows=rows, caption=caption, is_open=False)


def averaged(scores: Iterable[Score]) -> list[Score]:
    """Without those whose slots stay as their first chunk left them."""
    return [score for score in scores if not score.is_kept]


def averaging_table(
    caption: str, places: Sequence[Placed], columns: Mapping[Any, str], pick: Pick
) -> Iterable[Table]:
    """What running means change, seed by seed; no table where nothing was kept.

    Args:
        caption: of the table.
        places: scores, each with the column that it stands in.
        columns: titles, in order.
        pick: the figure.
    """

    def point(score: Score, place: Any) -> tuple:
        return score.model, score.slots_averaged, score.length, str(score.changes), place

    found = {point(score, place): score for score, place in places if not score.is_kept}
    pairs = [(s, place) for s, place in places if s.is_kept and point(s, place) in found]

    def gain(score: Score, place: Any) -> Values:
        own, kept = (pick(s, place) for s in (found[point(score, place)], score))
        return own.less(kept)

    if pairs:
        yield wide_table(caption, pairs, columns, gain)


def is_full_attention(score: Score) -> bool:
    """Whether a model of the sizes that all share keeps every token."""
    return score.model in ("full_attention", "full_attention_nope")


def by_length(scores: Iterable[Score]) -> list[Placed]:
    """Each score at its length."""
    return [(score, score.length) for score in scores]


def accuracy(score: Score, place: Any) -> Values:
    """The share of right answers, wherever it stands."""
    return score.accuracy


def length_columns(scores: Iterable[Score]) -> dict[int, str]:
    """Columns of lengths, in order."""
    return {length: f"{length:,}" for length in sorted({score.length for score in scores})}


def trained_task(suite: Suite) -> Mapping[str, Any]:
    """The task that the models were trained on; empty before any was begun."""
    return next((entry.config["task"] for entry in suite.entries if entry.config), {})
