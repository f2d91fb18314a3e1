"""The C++ kernel as functions from tensors and states to tensors and states.

The library is loaded at the first call, if :mod:`ovq.ops.ovq_attention.cpu.build` has made it; no
compiler is ever run from here.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.chunk_grid import ChunkGrid
from ovq.ops.ovq_attention.cpu.library import library_path
from ovq.ops.ovq_attention.dictionary import Centroid, DictionaryConfig, Growth, Seeding
from ovq.ops.ovq_attention.state import OVQState, Slots

DTYPES = (torch.float32, torch.bfloat16)
_GROWTH = {name: code for code, name in enumerate(get_args(Growth))}
_SEEDING = {name: code for code, name in enumerate(get_args(Seeding))}
_CENTROID = {name: code for code, name in enumerate(get_args(Centroid))}


def is_built() -> bool:
    """Whether the library of this source, PyTorch and processor is in the cache."""
    return _path().exists()


def why_not(dtype: torch.dtype, device: str, rate: str) -> str | None:
    """What keeps the kernel from inputs of this kind, ``None`` where nothing does."""
    if dtype not in DTYPES:
        return f"takes float32 and bfloat16, got {dtype}"
    if device != "cpu":
        return f"takes tensors on the CPU, got {device}"
    if rate != "mean":
        return f"takes rate='mean', got {rate!r}"
    if not is_built():
        return "is not built; `python -m ovq.ops.ovq_attention.cpu.build` builds it"
    return None


@cache
def _path() -> Path:
    return library_path()


@cache
def _options(dictionary: DictionaryConfig) -> tuple[int, ...]:
    d = dictionary
    seed = (d.seed + 2**63) % 2**64 - 2**63
    growth_length = d.growth_length or 1
    kind = _GROWTH[d.growth], growth_length, _SEEDING[d.seeding], seed
    return d.num_centroids, d.chunk_size, d.window_size, *kind, _CENTROID[d.centroid]


def forward_call(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    state: OVQState,
    cu_seqlens: Int[Tensor, " ends"] | None,
    fed: Slots | None,
) -> tuple[Float[Tensor, "B T H V"], OVQState, Slots, Float[Tensor, "B T H"]]:
    """:func:`forward` without a grid; the returned state shares what the call did not change."""
    if cu_seqlens is None:
        return _forward(q, k, v, beta, state, None, None, fed)
    ends = cu_seqlens.long()
    return _forward(q, k, v, beta, state, ends[:-1].contiguous(), ends.diff(), fed)


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    state: OVQState,
    grid: ChunkGrid,
    fed: Slots | None,
) -> tuple[Float[Tensor, "B T H V"], OVQState, Slots, Float[Tensor, "B T H"]]:
    """Outputs, the state after, the slots of all tokens, and the log-sum-exps of the softmax."""
    return _forward(q, k, v, beta, state, *_placed(grid), fed)


def _forward(q, k, v, beta, state, starts, lengths, fed):
    fed_tail, fed_tokens = fed or (None, None)
    o, lse, slots_tail, slots_tokens, *after = _op().forward(
        q, k, v, beta, state.key_means, state.value_means, state.counts, state.num_active,
        state.num_absorbed, state.tail_keys, state.tail_values, state.tail_length, fed_tail,
        fed_tokens, starts, lengths, *_options(state.dictionary),
    )  # fmt: skip
    names = ("tail_keys", "tail_values", "tail_length", "key_means", "value_means", "counts",
             "num_active", "num_absorbed")  # fmt: skip
    after = replace(state, **dict(zip(names, after, strict=False)))
    return o, after, Slots(slots_tail, slots_tokens), lse


def backward(
    grad_o: Float[Tensor, "B T H V"],
    grad_state: OVQState,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    tails: tuple[Tensor, Tensor],
    after: OVQState,
    slots: Slots,
    lse: Float[Tensor, "B T H"],
    grid: ChunkGrid,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, beta, key means, value means, tail keys and tail values."""
    d = after.dictionary
    return tuple(
        _op().backward(
            grad_o, grad_state.key_means, grad_state.value_means, grad_state.tail_keys,
            grad_state.tail_values, q, k, v, beta, *tails, grid.tail_length, after.key_means,
            after.value_means, after.counts, *slots, lse, *_placed(grid),
            d.num_centroids, d.chunk_size, d.window_size, _CENTROID[d.centroid],
        )
    )  # fmt: skip


def _placed(grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """Where the call's tokens of each row start in the flattened ``[B * T]``, and their number."""
    return grid.first - grid.num_tail_places, grid.length - grid.tail_length


@cache
def _op():
    """The library's operators, loaded."""
    torch.ops.load_library(_path())
    return torch.ops.ovq_cpu
