"""Times and peaks of memory of equal models, into one resumable file.

Times of different mixers are taken in turns, so that a change of the machine's pace meets all
alike; each peak of memory in a process of its own.
"""

import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ovq.benchmark import machine
from ovq.comparison.models import (
    check_mixers,
    equal_models,
    make_model,
    reference,
    sizes,
    token_ids,
)
from ovq.comparison.peak import peak_in_new_process
from ovq.comparison.steps import PILOT, decoding, run_forward, run_training_step
from ovq.layers.registry import MIXERS
from ovq.ops.ovq_attention.cpu.kernel import is_built
from ovq.runs import read_json, write_text

FORMAT = "ovq-compare"
PARTS = {
    "command": str, "status": str, "num_starts": int, "machine": dict, "config": dict,
    "reference": str, "models": dict, "figures": list,
}  # fmt: skip
FIGURES = ("forward", "forward+backward", "decode", "memory")
SHORT = 1.0  # seconds: a call that takes less is warmed up
LONGEST = 2**24  # tokens
LONG = 30.0  # seconds: a call that takes more is timed once, so that a figure takes a minute
ENOUGH = 6.0  # seconds: a call that has taken more is timed twice at most
MODEL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "window_size": 128,
    "dictionary": {"num_centroids": 512, "chunk_size": 128},
    "num_codes": 512,
    "block_size": 128,
}

# Done and all, in thousands of tokens, and what the latest figure is.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """What is compared.

    Attributes:
        mixers: names in the registry, each once.
        lengths: tokens ``T`` of one sequence, rising.
        pure: whether every layer has the mixer, and not every other a sliding window.
        budget: seconds that one run of a figure may take.
        num_repeats: samples of each figure of time.
        decode_tokens: tokens decoded for one sample.
        seed: of weights and tokens.
        model: fields of :class:`~ovq.models.OVQConfig`; the reference has its
            ``intermediate_size``.

    Raises:
        ValueError: unknown mixers, or a value out of its range.
    """

    mixers: tuple[str, ...] = tuple(MIXERS)
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    pure: bool = False
    budget: float = 120.0
    num_repeats: int = 3
    decode_tokens: int = 32
    seed: int = 0
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))

    def __post_init__(self):
        check_mixers(self.mixers)
        lengths = self.lengths
        if not lengths or min(lengths) < 2 or sorted(set(lengths)) != list(lengths):
            raise ValueError(f"lengths must be at least 2 and rise, got {list(lengths)}")
        if lengths[-1] > LONGEST:
            raise ValueError(f"lengths must be at most {LONGEST:,}, got {lengths[-1]:,}")
        if not 0 < self.budget < math.inf:
            raise ValueError(f"budget must be above 0 seconds and finite, got {self.budget}")
        for name in ("num_repeats", "decode_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def reference(self) -> str:
        """The mixer whose times divide the others'."""
        return reference(self.mixers)


class _Run:
    """A comparison in progress; every sample is written as soon as it is there."""

    def __init__(
        self, config: ComparisonConfig, path: Path, result: dict[str, Any], progress: Progress
    ):
        self.config, self.path, self.result, self.progress = config, path, result, progress
        self.configs = equal_models(config.mixers, config.model, pure=config.pure)
        self.models = {
            name: make_model(model_config, config.seed)
            for name, model_config in self.configs.items()
        }
        known = {_key(row): row for row in result["figures"]}
        self.rows = {
            (name, length, figure): known.get((name, length, figure))
            or _empty_row(name, length, figure)
            for length in config.lengths
            for figure in FIGURES
            for name in config.mixers
        }
        self.pilots: dict[tuple[str, str], float] = {}

    def save(self, what: str) -> None:
        """Write the file beside its place, rename it, and tell the progress."""
        rows = self.rows.values()
        self.result["figures"] = [row for row in rows if row["samples"] or row["skipped"]]
        write_text(self.path, json.dumps(self.result, indent=1, allow_nan=False) + "\n")
        total = sum(self._weight(row) for row in rows)
        self.progress(round(sum(self._weight(row) * self._done(row) for row in rows)), total, what)

    def _weight(self, row: dict[str, Any]) -> int:
        """About how long a figure takes, in thousands of tokens."""
        return max(1, row["length"] // 1024)

    def _done(self, row: dict[str, Any]) -> float:
        return 1.0 if self._is_done(row) else len(row["samples"]) / self.config.num_repeats

    def _is_done(self, row: dict[str, Any]) -> bool:
        samples = row["samples"]
        if row["skipped"] or (row["figure"] == "memory" and samples):
            return True
        return (
            len(samples) >= self.config.num_repeats
            or (len(samples) > 1 and sum(samples) > ENOUGH)
            or (len(samples) == 1 and samples[0] > LONG)
        )

    def measure_sizes(self) -> None:
        """Sizes and operations of every mixer that has none yet."""
        for name, config in self.configs.items():
            if name not in self.result["models"]:
                self.result["models"][name] = sizes(config, (PILOT, *self.config.lengths))
                self.save(f"{name}, operations")

    def measure_pilots(self) -> None:
        """A short step of every mixer that is not done: it warms up and gives first estimates."""
        for name, model in self.models.items():
            if all(self._is_done(row) for row in self.rows.values() if row["mixer"] == name):
                continue
            ids = token_ids(self.configs[name], PILOT, self.config.seed)
            for figure, run in (("forward", run_forward), ("forward+backward", run_training_step)):
                run(model, ids)
                self.pilots[name, figure] = _seconds(lambda run=run, m=model, i=ids: run(m, i))

    def estimate(self, name: str, length: int, figure: str) -> float | None:
        """Seconds from the longest length measured below this one, by the number of operations."""
        measured = [
            (row["length"], median(row["samples"]))
            for row in self.rows.values()
            if (row["mixer"], row["figure"]) == (name, figure)
            and row["samples"] and row["length"] < length
        ]  # fmt: skip
        if not measured and length > PILOT and (name, figure) in self.pilots:
            measured = [(PILOT, self.pilots[name, figure])]
        if not measured:
            return None
        flops = self.result["models"][name]["training_flops"]
        shorter, seconds = max(measured)
        return seconds * flops[str(length)] / flops[str(shorter)]

    def skip_what_takes_too_long(self, length: int, figure: str) -> None:
        """State a reason in place of each figure whose call would exceed the budget.

        A step costs what training does; decoding what its prompt does.
        """
        of = {"decode": "forward", "memory": "forward+backward"}.get(figure, figure)
        for name in self.config.mixers:
            row, at_pace = self.rows[name, length, figure], self.rows[name, length, of]
            if self._is_done(row) or row["samples"]:
                continue
            if of != figure:
                row["skipped"] = at_pace["skipped"]
                continue
            seconds = self.estimate(name, length, figure)
            if seconds is not None and seconds > self.config.budget:
                row["skipped"] = (
                    f"{figure} of {name} at T = {length:,} would take about {seconds:,.0f} s, "
                    f"the budget is {self.config.budget:,.0f} s"
                )

    def call(self, name: str, length: int, figure: str) -> Callable[[], None]:
        """What one sample times; a prompt to decode after is read here."""
        model, config, seed = self.models[name], self.configs[name], self.config.seed
        ids = token_ids(config, length, seed)
        if figure == "decode":
            return decoding(model, ids, token_ids(config, self.config.decode_tokens, seed + 1))
        run = run_forward if figure == "forward" else run_training_step
        return lambda: run(model, ids)

    def measure_times(self, length: int, figure: str) -> None:
        """Samples of every mixer in turns; a resumed run goes on with those that lack some."""
        self.skip_what_takes_too_long(length, figure)
        rows = {name: self.rows[name, length, figure] for name in self.config.mixers}
        calls = {
            name: self.call(name, length, figure)
            for name, row in rows.items()
            if not self._is_done(row)
        }
        cold = set(calls)
        while todo := [name for name in calls if not self._is_done(rows[name])]:
            fewest = min(len(rows[name]["samples"]) for name in todo)
            for name in todo:
                if len(rows[name]["samples"]) > fewest:
                    continue
                seconds = _seconds(calls[name])
                if name in cold and seconds < SHORT:
                    seconds = _seconds(calls[name])
                cold.discard(name)
                rows[name]["samples"].append(seconds)
                self.save(f"T={length:,} {figure}: {name}")

    def measure_memory(self, length: int) -> None:
        """The peak of a training step of every mixer, each in a fresh process."""
        self.skip_what_takes_too_long(length, "memory")
        for name, config in self.configs.items():
            row = self.rows[name, length, "memory"]
            if self._is_done(row):
                continue
            try:
                row["samples"].append(peak_in_new_process(config, length, self.config.seed))
            except ChildProcessError as error:
                row["skipped"] = f"memory of {name} at T = {length:,}: {error}"
            self.save(f"T={length:,} memory: {name}")


def _empty_row(name: str, length: int, figure: str) -> dict[str, Any]:
    unit = "bytes" if figure == "memory" else "seconds"
    return {
        "mixer": name, "length": length, "figure": figure, "unit": unit, "samples": [],
        "skipped": None,
    }  # fmt: skip


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["mixer"], row["length"], row["figure"]


def _seconds(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def compare(
    config: ComparisonConfig, path: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure what ``path`` lacks; every sample is written as soon as it is there.

    Args:
        config: what is compared.
        path: ``compare.json``, made or gone on with.
        progress: called after every sample.

    Returns:
        The content of the file.

    Raises:
        ValueError: mixers that cannot be made equal, or a file there that is damaged or of another
            configuration.
    """
    result = _begun(config, path)
    if result["status"] == "done":
        return result
    run = _Run(config, path, result, progress or (lambda done, total, what: None))
    run.measure_sizes()
    run.measure_pilots()
    for length in config.lengths:
        for figure in ("forward", "forward+backward", "decode"):
            run.measure_times(length, figure)
        run.measure_memory(length)
    result["status"] = "done"
    run.save("done")
    return result


def _begun(config: ComparisonConfig, path: Path) -> dict[str, Any]:
    plain = json.loads(json.dumps(asdict(config)))
    here = machine() | {"ovq_kernel": "cpu" if is_built() else "torch"}
    if path.exists():
        result = read_comparison(path)
        for name, found in (("config", plain), ("machine", here)):
            if result[name] != found:
                raise ValueError(
                    f"output must be empty or of the same {name}, got {path} of "
                    f"{_differences(result[name], found)}: give another output folder"
                )
        result["num_starts"] += result["status"] != "done"
        return result
    return {
        "format": FORMAT, "command": shlex.join(["ovq", *sys.argv[1:]]), "status": "unfinished",
        "num_starts": 1, "machine": here, "config": plain, "reference": config.reference,
        "models": {}, "figures": [],
    }  # fmt: skip


def _differences(told: dict[str, Any], found: dict[str, Any]) -> str:
    """Those of two flat records."""
    names = [name for name in told | found if told.get(name) != found.get(name)]
    return ", ".join(f"{name} {told.get(name)!r}, not {found.get(name)!r}" for name in names)


def read_comparison(path: Path) -> dict[str, Any]:
    """The content of a ``compare.json``.

    Raises:
        ValueError: the file is damaged or another's.
    """
    result = read_json(Path(path), "path", FORMAT, parts=PARTS)
    for row in result["figures"]:
        if not isinstance(row, dict) or _empty_row("", 0, "").keys() - row.keys():
            raise ValueError(f"path must be a whole compare.json, got {path} with the figure {row}")
    return result
