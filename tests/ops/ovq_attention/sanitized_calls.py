"""Calls of the C++ kernel for the sanitizers: ``python sanitized_calls.py LIBRARY``.

Sizes around every panel, block and part; the library given is used in place of the cached one. What
the numbers are is checked elsewhere: here every call must come back, and its results be finite.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ovq import DictionaryConfig, OVQState
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.ops.ovq_attention.cpu import kernel

# B, T, H, G, K, V, N, C: one of everything, vector widths less and more one, blocks, parts.
SIZES = [
    (1, 1, 1, 1, 1, 1, 1, 1),
    (2, 13, 4, 2, 5, 3, 6, 4),
    (1, 40, 3, 1, 17, 40, 40, 20),
    (1, 70, 2, 2, 33, 9, 16, 64),
    (3, 37, 2, 1, 16, 15, 7, 3),
    (1, 230, 4, 2, 64, 32, 150, 100),
    (1, 300, 8, 1, 8, 128, 300, 128),
]
VARIANTS = [
    {},
    {"growth": "linear", "growth_length": 24},
    {"growth": "immediate", "seeding": "novel"},
    {"seeding": "random", "seed": -3},
    {"seeding": "novel", "centroid": "unit"},
    {"window_chunks": 1},
    {"window_chunks": 3, "seeding": "novel", "centroid": "direction"},
]


def draw(B, T, H, G, K, V, *, dtype=torch.float32, key_norm=1.0, beta=4.0):
    """Random inputs that collect gradients."""
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, n, K), dim=-1) for n in (H, G))
    tensors = (q, key_norm * k, torch.randn(B, T, G, V), torch.full((H,), beta))
    return [x.to(dtype).requires_grad_() for x in tensors]


def make_config(num_centroids: int, chunk_size: int, *, window_chunks: int = 0, **fields):
    """A dictionary; the window in chunks."""
    window_size = window_chunks * chunk_size
    return DictionaryConfig(
        num_centroids=num_centroids, chunk_size=chunk_size, window_size=window_size, **fields
    )


def call(inputs, config: DictionaryConfig, state: OVQState | None = None, **options):
    """Forward and backward of the output and of all that the state holds; the state, detached."""
    o, after, slots = ovq_attention_with_slots(
        *inputs, state, dictionary=config, impl="cpu", **options
    )
    real = [x for x in after.tensors().values() if x.is_floating_point()]
    loss = o.float().square().sum() + sum(x.square().sum() for x in real)
    found = torch.autograd.grad(loss, inputs)
    assert all(x.isfinite().all() for x in [o, *real, *found])
    return after.detach(), slots


def decode(inputs, config: DictionaryConfig, state: OVQState, steps: int) -> None:
    """Some tokens one by one, without gradients."""
    q, k, v, beta = (x.detach() for x in inputs)
    for i in range(min(steps, q.shape[1])):
        token = (x[:, i : i + 1] for x in (q, k, v))
        o, state, _ = ovq_attention_with_slots(*token, beta, state, dictionary=config, impl="cpu")
        assert o.isfinite().all()


def all_sizes_and_variants() -> None:
    """From the start, carried on, decoded, on fed slots; on one thread and on two."""
    for index, (*sizes, N, C) in enumerate(SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            torch.set_num_threads(1 + index % 2)
            config = make_config(N, C, **VARIANTS[index % len(VARIANTS)])
            inputs = draw(*sizes, dtype=dtype)
            state, slots = call(inputs, config)
            call(inputs, config, slots=slots)
            state, _ = call(inputs, config, state)
            decode(inputs, config, state, steps=9)
    for variant in VARIANTS:
        config, state = make_config(6, 4, **variant), None
        for T in (0, 1, 3, 4, 5, 17):
            call(draw(2, T, 4, 2, 5, 3), config)
            state, _ = call(draw(2, T, 4, 2, 5, 3), config, state)
            decode(draw(2, 5, 4, 2, 5, 3), config, state, steps=5)


def packed_and_empty() -> None:
    """Empty sequences at either end and between, no row, a state at unlike phases."""
    for window_chunks in (0, 2):
        packed_with(make_config(6, 5, window_chunks=window_chunks))


def packed_with(config: DictionaryConfig) -> None:
    """The same of one dictionary."""
    lengths = (0, 7, 1, 0, 10, 13, 0)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    state = None
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = draw(1, sum(lengths), 4, 2, 5, 3, dtype=dtype)
            after, _ = call(inputs, config, state, cu_seqlens=ends)
        state = after
    call(draw(1, 0, 4, 2, 5, 3), config, cu_seqlens=torch.tensor([0, 0, 0]))
    call(draw(0, 5, 4, 2, 5, 3), config)
    empty, _ = call(draw(3, 0, 4, 2, 5, 3), config)
    call(draw(3, 21, 4, 2, 5, 3), config, empty)
    call(draw(7, 0, 4, 2, 5, 3), config, state)  # rows that wait, and no token


def extreme_values() -> None:
    """Keys of norm 0 and 1e4, beta 0 and 1e3, identical keys."""
    for centroid in ("mean", "unit", "direction"):
        config = DictionaryConfig(num_centroids=12, chunk_size=16, centroid=centroid)
        for key_norm in (0.0, 1e4):
            for beta in (0.0, 1e3, -1e3):
                for dtype in (torch.float32, torch.bfloat16):
                    inputs = draw(2, 70, 4, 2, 16, 8, dtype=dtype, key_norm=key_norm, beta=beta)
                    state, _ = call(inputs, config)
                    decode(inputs, config, state, steps=3)
        q, k, v, beta = draw(2, 70, 4, 2, 16, 8)
        call([q, k[:, :1].detach().expand_as(k).clone().requires_grad_(), v, beta], config)


def refused_slots() -> None:
    """Fed slots outside the dictionary raise, and write nothing."""
    config, inputs = DictionaryConfig(num_centroids=6, chunk_size=5), draw(1, 12, 4, 2, 5, 3)
    _, slots = call(inputs, config)
    for wrong in (-1, 6, 2**40):
        slots.tokens[0, 3, 1] = wrong
        try:
            call(inputs, config, slots=slots)
        except ValueError:
            continue
        raise AssertionError(f"slot {wrong} was taken")


def main(arguments: Sequence[str]) -> None:
    """Run everything with the library at the path given."""
    (library,) = arguments
    kernel._path = lambda: Path(library)
    torch.manual_seed(0)
    for part in (all_sizes_and_variants, packed_and_empty, extreme_values, refused_slots):
        part()
        print(f"{part.__name__}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
