"""Table and picture of ``fidelity.json``, from that file alone."""

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ovq.report import COLOURS, MARKERS, markdown_table, new_figure, save_figure
from ovq.runs import write_text


def by_distribution(result: dict[str, Any], num_centroids: int) -> dict[str, dict[str, list]]:
    """Errors of all parts by method and distribution, at one memory."""
    errors: dict[str, dict[str, list]] = {name: {} for name in result["methods"]}
    for row in result["errors"]:
        if row["num_centroids"] == num_centroids:
            errors[row["method"]].setdefault(row["distribution"], []).append(row["error"])
    return {name: found for name, found in errors.items() if found}


def distributions(result: dict[str, Any]) -> list[str]:
    """Names in the order of measurement."""
    return list(dict.fromkeys(row["distribution"] for row in result["errors"]))


def main_table(result: dict[str, Any], baseline: str) -> str:
    """Every method at ``N = T / 16``: mean error, its spread, and the change to the baseline."""
    names = distributions(result)
    errors = by_distribution(result, result["config"]["length"] // 16)
    base = errors[baseline]
    head = ["method", "what", *names]

    def cell(found: list[float], of_base: list[float]) -> str:
        spread = f" ± {stdev(found):.3f}" if len(found) > 1 else ""
        return f"{mean(found):.3f}{spread} ({100 * (mean(found) / mean(of_base) - 1):+.0f} %)"

    return markdown_table(
        head,
        (
            [name, result["methods"][name]["doc"], *(cell(found[d], base[d]) for d in names)]
            for name, found in errors.items()
        ),
    )


def memory_table(result: dict[str, Any], distribution: str) -> str:
    """Mean error of the methods that were measured at every memory."""
    sizes = sorted({row["num_centroids"] for row in result["errors"]})
    swept = [name for name, method in result["methods"].items() if method["swept"]]
    found = {size: by_distribution(result, size) for size in sizes}
    return markdown_table(
        [f"N, {distribution}", *(f"{size:,}" for size in sizes)],
        (
            [name, *(f"{mean(found[size][name][distribution]):.3f}" for size in sizes)]
            for name in swept
        ),
    )


def times_line(result: dict[str, Any]) -> str:
    """The seconds of each timed method over those of the first."""
    first = result["times"][0]["median"]
    ratios = ", ".join(f"{t['method']} {t['median'] / first:.2f}" for t in result["times"])
    return f"Time of the forward at N = T / 16, as a ratio, medians in turns: {ratios}.\n"


def markdown(result: dict[str, Any]) -> str:
    """All tables."""
    c, baseline = result["config"], next(iter(result["methods"]))
    source = f"; {c['model']} reading {c['text']}" if c["model"] else ""
    parts = [
        f"Relative error of the output against full attention, positions from T / 2 on, T = "
        f"{c['length']:,}{source}. Every method has the bytes of the paper's state with N slots "
        "(float32, chunks of 128). Mean over seeds or layers, ± their standard deviation, and the "
        "change of the mean.\n",
        f"**N = T / 16 = {c['length'] // 16:,}**\n\n" + main_table(result, baseline),
        times_line(result),
        *(
            f"**{name}, by memory**\n\n" + memory_table(result, name)
            for name in distributions(result)
        ),
    ]
    return "\n".join(parts)


def draw(result: dict[str, Any], path: Path) -> None:
    """Error against memory, one panel a distribution."""
    names = distributions(result)
    figure = new_figure(3.4 * len(names), 4.8)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    length = result["config"]["length"]
    swept = [name for name, method in result["methods"].items() if method["swept"]]
    sizes = sorted({row["num_centroids"] for row in result["errors"]})
    found = {size: by_distribution(result, size) for size in sizes}
    for axis, distribution in zip(axes, names, strict=True):
        for i, name in enumerate(swept):
            axis.plot(
                [size / length for size in sizes],
                [mean(found[size][name][distribution]) for size in sizes],
                color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], markersize=4,
                linestyle="--" if "k-means" in name else "-", label=name,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(distribution)
        axis.set_xlabel("N / T, paper's state of equal bytes", fontsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error of the output")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    save_figure(figure, path)


def write(result: dict[str, Any], folder: Path) -> None:
    """``table.md`` and ``fidelity.png``."""
    write_text(folder / "table.md", markdown(result))
    draw(result, folder / "fidelity.png")
