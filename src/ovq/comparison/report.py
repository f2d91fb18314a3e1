"""Tables and a picture of ``compare.json``, from that file alone."""

from pathlib import Path
from statistics import median
from typing import Any

from ovq.report import COLOURS, MARKERS, markdown_table, new_figure, save_figure
from ovq.runs import write_text

Medians = dict[tuple[str, int, str], float]


def medians(result: dict[str, Any]) -> Medians:
    """Seconds or bytes by mixer, length and figure; what was skipped is missing."""
    return {
        (row["mixer"], row["length"], row["figure"]): median(row["samples"])
        for row in result["figures"]
        if row["samples"]
    }


def sizes_table(result: dict[str, Any]) -> str:
    """Sizes of the models, and the bytes of their states at every length."""
    lengths = result["config"]["lengths"]
    head = ["mixer", "parameters", "codebooks", "intermediate_size"]
    head += [f"state at {length:,}, bytes" for length in lengths]
    rows = [
        [name, f"{model['parameters']:,}", f"{model['codebooks']:,}"]
        + [f"{model['intermediate_size']:,}"]
        + [f"{model['state_bytes'][str(length)]:,}" for length in lengths]
        for name, model in result["models"].items()
    ]
    return markdown_table(head, rows)


def length_table(result: dict[str, Any], length: int) -> str:
    """Operations, speed and memory of every mixer at one length, times also over the reference's.

    A number in brackets stands for a figure that was skipped and leads to its reason.
    """
    found, of = medians(result), result["reference"]
    num_decoded = result["config"]["decode_tokens"]
    head = [
        "mixer", "training GFLOPs a token", "forward, tokens/s", "time ratio",
        "forward+backward, tokens/s", "time ratio", "decode, ms a token", "time ratio",
        "peak of forward+backward, MiB",
    ]  # fmt: skip
    notes = {
        (row["mixer"], row["length"], row["figure"]): f"[{number}]"
        for number, row in enumerate(_skipped(result), start=1)
    }

    def cells(name: str, figure: str, form: Any) -> list[str]:
        key, base = (name, length, figure), found.get((of, length, figure))
        if key not in found:
            return [notes.get(key, "?"), ""]
        ratio = "" if base is None else f"{found[key] / base:.2f}"
        return [form(found[key]), ratio]

    rows = []
    for name, model in result["models"].items():
        flops = model["training_flops"][str(length)] / length
        row = [name, f"{flops / 1e9:.4f}"]
        for figure in ("forward", "forward+backward"):
            row += cells(name, figure, lambda seconds: f"{length / seconds:,.0f}")
        row += cells(name, "decode", lambda seconds: f"{1e3 * seconds / num_decoded:.2f}")
        row += cells(name, "memory", lambda peak: f"{peak / 2**20:,.0f}")[:1]
        rows.append(row)
    return markdown_table(head, rows)


def _skipped(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["figures"] if row["skipped"]]


def markdown(result: dict[str, Any]) -> str:
    """All tables, with the machine, the command, and the reasons of what was skipped."""
    m, c = result["machine"], result["config"]
    pattern = "the mixer in every layer" if c["pure"] else "sliding window and mixer in turns"
    starts = result["num_starts"]
    resumed = "" if starts == 1 else f" Taken in {starts} starts: the pace may differ between them."
    parts = [
        f"`{result['command']}` on {m['processor']} ({m['capability']}), {m['threads']} threads, "
        f"torch {m['torch']}, OVQ attention by '{m['ovq_kernel']}', seed {c['seed']}. Models of "
        f"{c['model']['num_hidden_layers']} layers, {pattern}, equal in parameters by "
        f"intermediate_size alone. Medians of up to {c['num_repeats']} samples taken in turns; "
        f"time ratio: over that of {result['reference']}, so that less is faster.{resumed}\n",
        sizes_table(result),
    ]
    for length in c["lengths"]:
        parts.append(f"**T = {length:,}**\n\n" + length_table(result, length))
    parts += [f"[{i}] {row['skipped']}.\n" for i, row in enumerate(_skipped(result), start=1)]
    return "\n".join(parts)


def draw(result: dict[str, Any], path: Path) -> None:
    """State, training speed and decoding time against length, as a PNG."""
    found, lengths = medians(result), result["config"]["lengths"]
    num_decoded = result["config"]["decode_tokens"]
    figure = new_figure(13.0, 5.2)
    panels = figure.subplots(1, 3)
    for index, (name, model) in enumerate(result["models"].items()):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": "--" if index >= len(COLOURS) else "-",
            "markersize": 4,
            "label": name,
        }
        trained = [t for t in lengths if (name, t, "forward+backward") in found]
        decoded = [t for t in lengths if (name, t, "decode") in found]
        panels[0].plot(lengths, [model["state_bytes"][str(t)] for t in lengths], **style)
        panels[1].plot(trained, [t / found[name, t, "forward+backward"] for t in trained], **style)
        panels[2].plot(
            decoded, [1e3 * found[name, t, "decode"] / num_decoded for t in decoded], **style
        )
    titles = ("state of one sequence, bytes", "forward+backward, tokens/s", "decode, ms a token")
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel("tokens")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    save_figure(figure, path)


def write(result: dict[str, Any], folder: Path) -> None:
    """``table.md`` and ``compare.png``."""
    write_text(folder / "table.md", markdown(result))
    draw(result, folder / "compare.png")
