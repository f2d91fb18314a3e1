"""The error of every method on every sample, at equal bytes, into one resumable file."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.fidelity.distributions import DISTRIBUTIONS, Sample
from ovq.fidelity.methods import METHODS, PAPER, WINNERS, exact, state_bytes
from ovq.fidelity.record import Data, alone, begin, write_fidelity
from ovq.ops.ovq_attention import DictionaryConfig

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
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise ValueError(f"seeds must differ and be at least 0, got {list(self.seeds)}")
        if self.num_repeats < 1:
            raise ValueError(f"num_repeats must be at least 1, got {self.num_repeats}")

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


def begun(config: FidelityConfig, path: Path, data: Data | None = None) -> dict[str, Any]:
    """What :func:`measure` would go on with: its ``status`` is ``"done"`` if nothing is left.

    Raises:
        ValueError: as :func:`measure`, of the file there.
    """
    return begin(asdict(config), path, data)


def measure(
    config: FidelityConfig,
    samples: Samples,
    path: Path,
    progress: Progress | None = None,
    data: Data | None = None,
) -> dict[str, Any]:
    """Measure every setting of every sample that ``path`` lacks; written after each sample.

    Args:
        config: what is measured.
        samples: the samples, and their number.
        path: ``fidelity.json``, made or gone on with; returned as it is if it is done.
        progress: called after each measurement.
        data: what a model reads and is read from, for a later call to compare.

    Returns:
        The content of the file.

    Raises:
        ValueError: the file there is damaged, or of another configuration, other methods or other
            data; another run writes to its folder; outputs are not finite.
    """
    with alone(path.parent):
        result = begun(config, path, data)
        if result["status"] != "done":
            write_fidelity(path, result)  # a folder that takes no files is found out now
            _measure(config, samples, path, result, progress)
    return result


def _measure(
    config: FidelityConfig,
    samples: Samples,
    path: Path,
    result: dict[str, Any],
    progress: Progress | None,
) -> None:
    settings = config.settings()
    held = Counter((row["distribution"], row["part"]) for row in result["errors"])
    whole = {sample for sample, number in held.items() if number == len(settings)}
    rows = [row for row in result["errors"] if (row["distribution"], row["part"]) in whole]
    result["errors"] = rows
    total, done = samples[1] * len(settings), 0
    for sample in samples[0]:
        if (sample.distribution, sample.part) not in whole:
            with torch.no_grad():
                rows += _errors(sample, settings, done, total, progress)
            write_fidelity(path, result)
        done += len(settings)
    result["times"] = times(config)
    result["status"] = "done"
    write_fidelity(path, result)


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
