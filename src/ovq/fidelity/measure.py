"""The error of every method on every sample, at equal bytes, into one resumable file."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import ovq
from ovq.fidelity.distributions import DISTRIBUTIONS, Sample
from ovq.fidelity.methods import METHODS, PAPER, WINNERS, exact, state_bytes
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.runs import write_text

FORMAT = "ovq-fidelity"
# Done and all measurements, and the latest of them.
Progress = Callable[[int, int, dict[str, Any]], None]
# Samples, and how many there are in all.
Samples = tuple[Iterable[Sample], int]


@dataclass(frozen=True, kw_only=True)
class FidelityConfig:
    """What is measured.

    Attributes:
        length: tokens ``T``.
        num_centroids: slots of the paper's dictionary, whose bytes every method gets.
        seeds: of the drawn distributions.
        model: a pretrained model as :func:`~ovq.fidelity.pretrained.load_pretrained` takes it, or
            none.
        text: name of the text that the model reads.
        num_repeats: of the times, of which the median counts.

    Raises:
        ValueError: a size out of its range.
    """

    length: int = 8192
    num_centroids: tuple[int, ...] = (64, 256, 1024, 4096)
    seeds: tuple[int, ...] = (0, 1, 2)
    model: str | None = None
    text: str | None = None
    num_repeats: int = 5

    def __post_init__(self):
        if self.length < 1024 or self.length % 16:
            raise ValueError(f"length must be a multiple of 16 from 1,024 on, got {self.length}")
        if self.num_centroids and min(self.num_centroids) < 1:
            raise ValueError(f"num_centroids must be at least 1, got {min(self.num_centroids)}")

    @property
    def main_size(self) -> int:
        """``N = T / 16``, at which every method is measured."""
        return self.length // 16

    def settings(self) -> list[tuple[str, int]]:
        """Method and number of centroids of every measurement of a sample."""
        sizes = sorted({*self.num_centroids, self.main_size})
        return [
            (name, size)
            for size in sizes
            for name, method in METHODS.items()
            if method.swept or size == self.main_size
        ]


def relative_error(o: Float[Tensor, "S H V"], target: Float[Tensor, "S H V"]) -> float:
    """``||O - O*||_F / ||O*||_F``, for the second half of the tokens.

    Raises:
        ValueError: the outputs are not finite.
    """
    error = float((o - target).norm() / target.norm())
    if not error < float("inf"):
        raise ValueError(f"outputs must be finite, got a relative error of {error}")
    return error


def drawn_samples(config: FidelityConfig) -> Iterator[Sample]:
    """The samples that need no model."""
    for draw in DISTRIBUTIONS.values():
        for seed in config.seeds:
            yield draw(config.length, seed)


def measure(
    config: FidelityConfig, samples: Samples, path: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure every setting of every sample that ``path`` lacks; written after each sample.

    Args:
        config: what is measured.
        samples: the samples, and their number.
        path: ``fidelity.json``, made or gone on with.
        progress: called after each measurement.

    Returns:
        The content of the file.

    Raises:
        ValueError: the file there is damaged or of another configuration, or outputs are not
            finite.
    """
    result = _begun(config, path)
    rows: list[dict[str, Any]] = result["errors"]
    known = {(row["distribution"], row["part"]) for row in rows}
    settings = config.settings()
    total, done = samples[1] * len(settings), 0
    for sample in samples[0]:
        if (sample.distribution, sample.part) not in known:
            with torch.no_grad():
                rows += _errors(sample, settings, done, total, progress)
            write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
        done += len(settings)
    if not result["times"]:
        result["times"] = times(config)
    result["status"] = "done"
    write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def _errors(
    sample: Sample,
    settings: list[tuple[str, int]],
    done: int,
    total: int,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    target, rows = exact(sample), []
    for name, size in settings:
        num_bytes = paper_bytes(sample, size)
        error = relative_error(METHODS[name].run(sample, num_bytes), target)
        rows.append(
            {
                "distribution": sample.distribution, "part": sample.part, "method": name,
                "num_centroids": size, "num_bytes": num_bytes, "error": error,
            }
        )  # fmt: skip
        if progress is not None:
            progress(done + len(rows), total, rows[-1])
    return rows


def paper_bytes(sample: Sample, num_centroids: int) -> int:
    """Bytes of the paper's state with so many slots: what every method gets."""
    return state_bytes(
        sample, DictionaryConfig(num_centroids=num_centroids, **METHODS[PAPER].dictionary)
    )


@torch.no_grad()
def times(config: FidelityConfig) -> list[dict[str, Any]]:
    """Seconds of the paper's rule and of the winners at ``N = T / 16``, in turns."""
    sample = DISTRIBUTIONS["zipf"](config.length, 0)
    num_bytes = paper_bytes(sample, config.main_size)
    names = (PAPER, *WINNERS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(config.num_repeats + 1):
        for name in names:
            begun = time.perf_counter()
            METHODS[name].run(sample, num_bytes)
            if repeat:  # the first of each warms up
                seconds[name].append(time.perf_counter() - begun)
    threads = torch.get_num_threads()
    return [
        {"method": name, "median": median(all_), "all": all_, "threads": threads}
        for name, all_ in seconds.items()
    ]


def _begun(config: FidelityConfig, path: Path) -> dict[str, Any]:
    plain = json.loads(json.dumps(asdict(config)))
    if not path.exists():
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "ovq": ovq.__version__,
        }
        methods = {
            name: {"doc": m.doc, "dictionary": m.dictionary, "swept": m.swept}
            for name, m in METHODS.items()
        }
        return {
            "format": FORMAT, "config": plain, "machine": machine, "methods": methods,
            "status": "unfinished", "errors": [], "times": [],
        }  # fmt: skip
    result = read_fidelity(path)
    if result["config"] != plain:
        raise ValueError(
            f"output must be empty or of the same configuration, got {path} with others: give "
            "another output folder"
        )
    return result


def read_fidelity(path: Path) -> dict[str, Any]:
    """The content of a ``fidelity.json``.

    Raises:
        ValueError: the file is damaged or another's.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"path must be a whole fidelity.json, got {path}: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"path must be a file that ovq fidelity wrote, got {path}")
    return result
