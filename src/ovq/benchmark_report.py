"""Tables and a picture of ``bench.json``, from that file alone."""

from pathlib import Path
from typing import Any

from ovq.report import COLOURS, markdown_table, new_figure, save_figure
from ovq.runs import read_json, write_text


def read_benchmark(path: Path) -> dict[str, Any]:
    """The content of a ``bench.json``.

    Raises:
        ValueError: the file is damaged or another's.
    """
    return read_json(Path(path), "path", "ovq-bench")


def _medians(result: dict[str, Any], which: str, dtype: str) -> dict[tuple, float]:
    return {
        (row["length"], row["impl"], row["num_centroids"]): row["median"]
        for row in result["times"]
        if (row["pass"], row["dtype"]) == (which, dtype)
    }


def times_table(result: dict[str, Any], which: str, dtype: str) -> str:
    """Seconds of softmax attention, and how many times as fast OVQ is, by length."""
    medians = _medians(result, which, dtype)
    lengths = sorted({length for length, _, _ in medians})
    columns = sorted({(i, n) for _, i, n in medians if i != "sdpa"})
    head = ["tokens", "SDPA, s", *(f"{impl}, N = {number:,}" for impl, number in columns)]
    rows = [
        [f"{length:,}", f"{medians[length, 'sdpa', None]:.4f}"]
        + [f"{medians[length, 'sdpa', None] / medians[length, i, n]:.2f}x" for i, n in columns]
        for length in lengths
    ]
    return markdown_table(head, rows)


def decode_table(result: dict[str, Any]) -> str:
    """Milliseconds a token after many tokens."""
    by = {(row["after"], row["impl"]): row["median_ms"] for row in result["decode"]}
    impls = sorted({impl for _, impl in by} - {"sdpa"})
    head = ["tokens before", "SDPA over a cache, ms", *(f"{impl}, ms" for impl in impls), "ratio"]
    rows = [
        [f"{after:,}", f"{by[after, 'sdpa']:.3f}"]
        + [f"{by[after, impl]:.4f}" for impl in impls]
        + [f"{by[after, 'sdpa'] / by[after, impls[-1]]:.1f}x"]
        for after in sorted({after for after, _ in by})
    ]
    return markdown_table(head, rows)


def memory_table(result: dict[str, Any]) -> str:
    """Peak MiB of forward and backward over those before the call."""
    by = {(row["length"], row["impl"]): row["peak_bytes"] for row in result["memory"]}
    impls = list(dict.fromkeys(row["impl"] for row in result["memory"]))
    names = {"sdpa": "SDPA", "autograd": "plain autograd"}
    head = ["tokens", *(f"{names.get(impl, impl)}, MiB" for impl in impls)]
    rows = [
        [f"{length:,}", *(f"{by[length, impl] / 2**20:,.0f}" for impl in impls)]
        for length in sorted({length for length, _ in by})
    ]
    return markdown_table(head, rows)


def floor_table(result: dict[str, Any]) -> str:
    """The forward against the bare products it cannot do without."""
    medians = _medians(result, "forward", "float32")
    impls = sorted({impl for _, impl, _ in medians} - {"sdpa"})
    head = ["tokens", "N", "floor, s", *(f"{impl} / floor" for impl in impls)]
    rows = [
        [f"{floor['length']:,}", f"{floor['num_centroids']:,}", f"{floor['seconds']:.4f}"]
        + [
            f"{medians[floor['length'], impl, floor['num_centroids']] / floor['seconds']:.2f}"
            for impl in impls
        ]
        for floor in result["floors"]
    ]
    return markdown_table(head, rows)


def markdown(result: dict[str, Any]) -> str:
    """All tables, with the machine and the command."""
    m = result["machine"]
    parts = [
        f"`{result['command']}` on {m['processor']} ({m['capability']}), {m['threads']} threads, "
        f"torch {m['torch']}; {result['config']['num_heads']} heads of "
        f"{result['config']['head_dim']}, chunks of {result['config']['chunk_size']}; medians. "
        "Columns of OVQ say how many times as fast as SDPA it is.\n"
    ]
    kinds = dict.fromkeys((row["pass"], row["dtype"]) for row in result["times"])
    for which, dtype in kinds:
        parts.append(f"**{which}, {dtype}**\n\n" + times_table(result, which, dtype))
    crossings = ", ".join(
        f"{name.replace(' ', ' with N = ')}: {'none' if at is None else f'{at:,.0f} tokens'}"
        for name, at in result["crossovers"].items()
    )
    parts.append(f"Faster than SDPA (forward, float32) from: {crossings}.\n")
    parts.append(
        "**forward against the floor of bare products, float32**\n\n" + floor_table(result)
    )
    parts.append("**decode**\n\n" + decode_table(result))
    parts.append("**peak memory of forward and backward**\n\n" + memory_table(result))
    return "\n".join(parts)


def summary(result: dict[str, Any]) -> str:
    """The README's table: the fastest implementation at a few lengths."""
    impl = result["config"]["implementations"][-1]
    kinds = [("forward", "float32"), ("forward+backward", "float32"), ("forward", "bfloat16")]
    numbers = [n for n in (1024, 2048) if n in result["config"]["num_centroids"]]
    lengths = sorted({row["length"] for row in result["times"]})[-7::2]
    rows = []
    for which, dtype in kinds:
        medians = _medians(result, which, dtype)
        for number in numbers:
            faster = [medians[t, "sdpa", None] / medians[t, impl, number] for t in lengths]
            label = f"{which}, {dtype}, N = {number:,}"
            rows.append([label, *(f"{ratio:.1f}x" for ratio in faster)])
    return markdown_table(["SDPA's time / OVQ's", *(f"{t:,} tokens" for t in lengths)], rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """Time and peak memory against the number of tokens, the crossover marked, as a PNG."""
    figure = new_figure(12.0, 4.4)
    panels = figure.subplots(1, 3)
    impl = result["config"]["implementations"][-1]
    numbers = result["config"]["num_centroids"]
    for panel, which in zip(panels, ("forward", "forward+backward"), strict=False):
        medians = _medians(result, which, "float32")
        lengths = sorted({length for length, _, _ in medians})
        curves = [("sdpa", None, "SDPA")] + [(impl, n, f"OVQ ({impl}), N = {n:,}") for n in numbers]
        for index, (name, number, label) in enumerate(curves):
            seconds = [medians[length, name, number] for length in lengths]
            panel.plot(lengths, seconds, "o-", ms=3, color=COLOURS[index], label=label)
        panel.set_title(f"{which}, float32, seconds")
    for index, number in enumerate(numbers, start=1):
        at = result["crossovers"].get(f"{impl} {number}")
        if at is not None:
            panels[0].axvline(at, color=COLOURS[index], ls=":", lw=1)
            panels[0].annotate(
                f"{at:,.0f}", (at, 0.99 - 0.06 * index), xycoords=("data", "axes fraction"),
                fontsize=7, color=COLOURS[index],
            )  # fmt: skip
    for index, name in enumerate(dict.fromkeys(row["impl"] for row in result["memory"])):
        rows = [row for row in result["memory"] if row["impl"] == name]
        label = {"sdpa": "SDPA", "autograd": "OVQ, plain autograd"}.get(name, f"OVQ ({name})")
        peaks = [row["peak_bytes"] / 2**20 for row in rows]
        panels[2].plot(
            [row["length"] for row in rows], peaks, "s-", ms=3, color=COLOURS[index], label=label
        )
    panels[2].set_title("forward+backward, peak MiB")
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def write(result: dict[str, Any], output: Path) -> None:
    """Write ``table.md`` and ``bench.png`` beside ``bench.json``."""
    write_text(output / "table.md", markdown(result))
    draw(result, output / "bench.png")
