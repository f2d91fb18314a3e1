"""Time and memory of OVQ attention beside PyTorch's softmax attention, side by side in one process.

Every implementation is first compared with ``reference``; where one differs there is no figure.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, scaled_dot_product_attention

import ovq
from ovq.ops.ovq_attention import DictionaryConfig, OVQState, ovq_attention
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.runs import write_text

BETA = 8.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What plain torch loses in each dtype on products of this size, as a share of the largest entry.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}

# Called after every figure with a line that says what was measured.
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What is measured.

    Attributes:
        lengths: tokens ``T`` of one sequence.
        num_centroids: dictionaries ``N``.
        dtypes: names in ``DTYPES``.
        implementations: of OVQ attention, those that are there.
        num_heads: ``H = G``.
        head_dim: ``K = V``.
        chunk_size: ``C``.
        num_repeats: of each figure, which is their median; fewer where one run takes seconds.
        decode_after: tokens before the decoded ones.
        decode_centroids: ``N`` while decoding.
        decode_tokens: tokens decoded for one mean.
        memory_lengths: tokens in the measurements of peak memory.
        memory_centroids: ``N`` there.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    num_centroids: tuple[int, ...] = (256, 1024, 2048, 4096)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    implementations: tuple[str, ...] = ("torch", "cpu")
    num_heads: int = 4
    head_dim: int = 64
    chunk_size: int = 128
    num_repeats: int = 5
    decode_after: tuple[int, ...] = (1024, 65536, 1048576)
    decode_centroids: int = 1024
    decode_tokens: int = 1024
    memory_lengths: tuple[int, ...] = (2048, 8192, 32768)
    memory_centroids: int = 1024

    @property
    def num_steps(self) -> int:
        """Lines of progress that a benchmark of this configuration gives."""
        impls, passes = len(self.implementations), sum(1 + (d == "float32") for d in self.dtypes)
        figures = passes * len(self.lengths) + 2 * len(self.decode_after)
        return impls * len(self.dtypes) + figures + len(self.memory_lengths) * (impls + 2)

    def dictionary(self, num_centroids: int) -> DictionaryConfig:
        """The dictionary of a measurement."""
        return DictionaryConfig(num_centroids=num_centroids, chunk_size=self.chunk_size)

    def inputs(self, length: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
        """Unit-norm queries and keys, and values, ``[1, T, H, K]``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (1, length, self.num_heads, self.head_dim)
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
        return tuple(x.to(dtype) for x in (normalize(q, dim=-1), normalize(k, dim=-1), v))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's own kernel, in the layout of this library."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=BETA).transpose(1, 2)


def check(impl: str, dtype: str, config: BenchmarkConfig) -> None:
    """Compare an implementation with ``reference``: output, state and gradients, on equal slots.

    Raises:
        ValueError: they differ by more than the dtype loses; no figure is given then.
    """
    dictionary = config.dictionary(64)
    results = []
    slots = None
    for name in ("reference", impl):
        inputs = config.inputs(5 * config.chunk_size + 3, DTYPES[dtype])
        q, k, v = (tensor.requires_grad_() for tensor in inputs)
        o, state, slots = ovq_attention_with_slots(
            q, k, v, BETA, dictionary=dictionary, impl=name, slots=slots
        )
        weight = torch.arange(o.numel(), dtype=torch.float32).cos().view(o.shape)
        loss = (o.float() * weight).sum() + state.value_means.cos().sum()
        gradients = torch.autograd.grad(loss, (q, k, v))
        results.append((o, state.key_means, state.value_means, *gradients))
    names = ("output", "key means", "value means", "gradient of q", "of k", "of v")
    for name, expected, found in zip(names, *results, strict=True):
        error = (found - expected).abs().max() / expected.abs().max()
        if not error <= TOLERANCES[dtype]:
            raise ValueError(
                f"impl {impl!r} must equal 'reference' within {TOLERANCES[dtype]} in {dtype}, got "
                f"{error:.1e} in the {name}: no figures"
            )


def interleaved(calls: dict[str, Callable[[], Any]], num_repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of each call, in turns, so that a change of the machine's pace meets all alike.

    The first run of a call warms up and counts only if it takes over a second; a call that has
    taken 12 s rests once it has been timed twice.
    """
    first = {name: _timed(call) for name, call in calls.items()}
    seconds = {name: [at] if at > 1.0 else [] for name, at in first.items()}
    for _ in range(num_repeats):
        for name, call in calls.items():
            if len(seconds[name]) < 2 or sum(seconds[name]) < 12.0:
                seconds[name].append(_timed(call))
    return {name: {"median": median(all_), "all": all_} for name, all_ in seconds.items()}


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _forward(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    def run() -> None:
        with torch.no_grad():
            call(*inputs)

    return run


def _forward_backward(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)

    def run() -> None:
        o = call(*leaves)
        o = o[0] if isinstance(o, tuple) else o
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    return run


def _ovq(impl: str, dictionary: DictionaryConfig) -> Callable[..., Any]:
    return lambda q, k, v: ovq_attention(q, k, v, BETA, dictionary=dictionary, impl=impl)


def measure_times(config: BenchmarkConfig, progress: Progress) -> Iterator[dict[str, Any]]:
    """Forward, and forward and backward, at every length, dictionary and dtype."""
    for dtype in config.dtypes:
        for length in config.lengths:
            inputs = config.inputs(length, DTYPES[dtype])
            for name, wrap in (("forward", _forward), ("forward+backward", _forward_backward)):
                if dtype == "bfloat16" and name != "forward":
                    continue
                calls = {"sdpa": wrap(softmax_attention, inputs)}
                for number in config.num_centroids:
                    for impl in config.implementations:
                        call = _ovq(impl, config.dictionary(number))
                        calls[f"{impl} {number}"] = wrap(call, inputs)
                seconds = interleaved(calls, config.num_repeats)
                progress(f"{name} {dtype} T={length:,}: sdpa {seconds['sdpa']['median']:.4f} s")
                for call_name, figure in seconds.items():
                    impl, _, number = call_name.partition(" ")
                    yield {
                        "pass": name, "dtype": dtype, "length": length, "impl": impl,
                        "num_centroids": int(number) if number else None, **figure,
                    }  # fmt: skip


def measure_floor(config: BenchmarkConfig, length: int, num_centroids: int) -> dict[str, Any]:
    """Seconds of the bare products of a forward, at this machine's rate for their shapes.

    Of every chunk: ``q D_k^T``, ``p D_v`` and ``k D_k^T`` over the slots active then, and ``q k^T``
    and ``p v`` inside the chunk, of which causality needs half. The rate is measured at sixteen
    numbers of slots along the growth and interpolated.
    """
    C, K, H = config.chunk_size, config.head_dim, config.num_heads
    dictionary, active = config.dictionary(num_centroids), [0]
    for j in range(length // C):
        active.append(dictionary.num_active_after(active[-1], (j + 1) * C))
    tokens = torch.randn(H, C, K)
    widths = sorted({max(1, active[len(active) * i // 16]) for i in range(16)} | {active[-1]})
    rates = []
    for width in (*widths, C):
        keys, weights = torch.randn(H, width, K), torch.randn(H, C, width)
        scores, read = torch.empty(H, C, width), torch.empty(H, C, K)
        product = _repeated(lambda k=keys, s=scores: torch.bmm(tokens, k.mT, out=s))
        reading = _repeated(lambda k=keys, w=weights, r=read: torch.bmm(w, k, out=r))
        rates.append((product, reading))
    in_chunk = sum(rates.pop()) / 2
    total = 0.0
    for n in active[:-1]:
        total += in_chunk + _interpolated(n, widths, [2 * a + b for a, b in rates])
    return {"length": length, "num_centroids": num_centroids, "seconds": total}


def _repeated(call: Callable[[], Any]) -> float:
    call()
    return median(_timed(call) for _ in range(31))


def _interpolated(n: int, widths: list[int], seconds: list[float]) -> float:
    if n <= widths[0]:
        return seconds[0] * n / widths[0]
    for low, high, before, after in zip(widths, widths[1:], seconds, seconds[1:], strict=False):
        if n <= high:
            return before + (after - before) * (n - low) / (high - low)
    return seconds[-1]


@torch.no_grad()
def measure_decode(config: BenchmarkConfig, progress: Progress) -> Iterator[dict[str, Any]]:
    """Milliseconds a token after many tokens, beside softmax attention over their keys and values.

    The attention is given its cache ready made: nothing is appended.
    """
    dictionary = config.dictionary(config.decode_centroids)
    steps = config.inputs(config.decode_tokens, torch.float32, seed=1)
    impl = config.implementations[-1]
    for after in config.decode_after:
        state = _absorbed(config, dictionary, after, impl)

        def decode(state: OVQState | None = state) -> None:
            for i in range(config.decode_tokens):
                q, k, v = (tensor[:, i : i + 1] for tensor in steps)
                _, state = ovq_attention(q, k, v, BETA, state, dictionary=dictionary, impl=impl)

        shape = (1, config.num_heads, after, config.head_dim)
        cache = [torch.randn(shape) for _ in range(2)]
        num_steps = max(4, min(config.decode_tokens, 2**22 // after))

        def attend(cache: list[Tensor] = cache, num_steps: int = num_steps) -> None:
            for i in range(num_steps):
                q = steps[0][:, i : i + 1].transpose(1, 2)
                scaled_dot_product_attention(q, cache[0], cache[1], scale=BETA)

        seconds = interleaved({impl: decode, "sdpa": attend}, config.num_repeats)
        for name, number in ((impl, config.decode_tokens), ("sdpa", num_steps)):
            ms = [1e3 * value / number for value in seconds[name]["all"]]
            progress(f"decode after {after:,}: {name} {median(ms):.4f} ms a token")
            yield {
                "after": after, "impl": name, "num_centroids": config.decode_centroids,
                "median_ms": median(ms), "all_ms": ms,
            }  # fmt: skip


def _absorbed(
    config: BenchmarkConfig, dictionary: DictionaryConfig, num_tokens: int, impl: str
) -> OVQState | None:
    state, piece = None, 65536
    for start in range(0, num_tokens, piece):
        inputs = config.inputs(min(piece, num_tokens - start), torch.float32, seed=start + 2)
        q, k, v = inputs
        _, state = ovq_attention(q, k, v, BETA, state, dictionary=dictionary, impl=impl)
    return state


def measure_memory(config: BenchmarkConfig, progress: Progress) -> Iterator[dict[str, Any]]:
    """Peak bytes of forward and backward over those before the call, each in a fresh process."""
    for length in config.memory_lengths:
        for impl in ("sdpa", *config.implementations, "autograd"):
            options = json.dumps([impl, length, config.memory_centroids, asdict(config)])
            done = subprocess.run(
                [sys.executable, "-m", "ovq.benchmark", options],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            peak = int(done.stdout)
            progress(f"peak memory T={length:,}: {impl} {peak / 2**20:,.0f} MiB")
            yield {
                "length": length, "impl": impl, "num_centroids": config.memory_centroids,
                "peak_bytes": peak,
            }  # fmt: skip


def peak_of_call(impl: str, length: int, num_centroids: int, config: BenchmarkConfig) -> int:
    """Peak bytes of this process during forward and backward, over those it held before.

    ``autograd`` is the chunked forward with PyTorch's own backward, which keeps every chunk.
    """
    from ovq.ops.ovq_attention import chunked
    from ovq.ops.ovq_attention.chunk_grid import ChunkGrid

    dictionary = config.dictionary(num_centroids)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        H, K = config.num_heads, config.head_dim
        state = OVQState.empty(1, H, K, K, dictionary=dictionary)
        grid = ChunkGrid.of(1, q.shape[1], state.tail_length, None, dictionary)
        return chunked.forward(q, k, v, torch.full((H,), BETA), state, grid, None)[0]

    calls = {"sdpa": softmax_attention, "autograd": plain}
    call = calls[impl] if impl in calls else _ovq(impl, dictionary)
    _forward_backward(call, config.inputs(2 * config.chunk_size, torch.float32))()  # warm
    return peak_during(_forward_backward(call, config.inputs(length, torch.float32)))


def peak_during(run: Callable[[], Any]) -> int:
    """Peak bytes of this process during a call, over those it held before.

    Raises:
        OSError: the system has no ``/proc``.
    """
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise OSError("peak memory is measured through /proc, which this system lacks")
    reset.write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status must hold {field}")


def crossover(times: list[dict[str, Any]], impl: str, num_centroids: int) -> float | None:
    """The length at which OVQ's forward in float32 begins to be faster for good, interpolated."""
    ratios = []
    for length in sorted({row["length"] for row in times}):
        of = {
            (row["impl"], row["num_centroids"]): row["median"]
            for row in times
            if (row["pass"], row["dtype"], row["length"]) == ("forward", "float32", length)
        }
        ratios.append((length, of["sdpa", None] / of[impl, num_centroids]))
    slower = [i for i, (_, ratio) in enumerate(ratios) if ratio < 1]
    if not slower:
        return float(ratios[0][0])
    if slower[-1] == len(ratios) - 1:
        return None
    (low, before), (high, after) = ratios[slower[-1]], ratios[slower[-1] + 1]
    return low * (high / low) ** ((1 - before) / (after - before))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
    return {
        "processor": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ovq": ovq.__version__,
        "system": platform.system(),
    }


def benchmark(config: BenchmarkConfig, output: Path, progress: Progress) -> dict[str, Any]:
    """Measure everything and write ``bench.json``.

    Raises:
        ValueError: an implementation differs from ``reference``.
    """
    for impl in config.implementations:
        for dtype in config.dtypes:
            check(impl, dtype, config)
            progress(f"{impl} equals reference in {dtype}")
    times = list(measure_times(config, progress))
    goals = [(n, t) for n in config.num_centroids for t in config.lengths[-3:]]
    result = {
        "format": "ovq-bench",
        "command": " ".join(["ovq", *sys.argv[1:]]),
        "machine": machine(),
        "config": asdict(config),
        "times": times,
        "floors": [measure_floor(config, length, number) for number, length in goals],
        "crossovers": {
            f"{impl} {number}": crossover(times, impl, number)
            for impl in config.implementations
            for number in config.num_centroids
        },
        "decode": list(measure_decode(config, progress)),
        "memory": list(measure_memory(config, progress)),
    }
    write_text(output / "bench.json", json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":  # one measurement of peak memory, in a process of its own
    given_impl, given_length, given_centroids, fields = json.loads(sys.argv[1])
    print(peak_of_call(given_impl, given_length, given_centroids, BenchmarkConfig(**fields)))
