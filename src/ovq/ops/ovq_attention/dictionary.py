"""The dictionary's rules that need no tensor of keys: its configuration, its growth, its hash."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

Growth = Literal["saturating", "linear", "immediate"]
Seeding = Literal["spread", "random", "novel"]
Rate = Literal["mean", "constant"]
Centroid = Literal["mean", "unit", "direction"]

# Products are compared after rounding to this grid: repeated keys make near-ties the normal case.
GRID = 2.0**16


@dataclass(frozen=True, kw_only=True)
class DictionaryConfig:
    """How the dictionary of OVQ attention is learned. The defaults are the paper's.

    Attributes:
        num_centroids: slots ``N`` per key-value head, at least 1.
        chunk_size: tokens ``C`` between updates, at least 1; part of the mathematics.
        growth: how many slots are active after ``t`` tokens: ``saturating`` ``N t / (t + N)``,
            ``linear`` ``N t / growth_length``, ``immediate`` ``min(N, t)``.
        growth_length: tokens after which ``linear`` growth is complete; that growth alone needs it.
        seeding: which keys open new slots: ``spread`` those farthest from the dictionary, ``novel``
            those farthest from the dictionary and from the earlier keys of their chunk, ``random``
            by a hash of ``seed``, position and head.
        seed: of ``random`` seeding.
        rate: ``mean`` keeps exact running means, ``constant`` moves a slot by ``step`` toward the
            mean of its new members.
        step: of the ``constant`` rate, in [0, 1]; with 0 a slot stays as its first chunk left it,
            and tokens that join it later are only counted.
        centroid: ``mean`` reads the key centroids, and compares keys with them, as they are;
            ``unit`` scaled to unit norm; ``direction`` reads them as they are and compares keys
            with them at unit norm, for keys of any norm. With ``unit``, keys are meant to have unit
            norm: where keys of norm near 0 or of very unlike norms share a slot, gradients of
            ``torch`` and ``cpu`` are inaccurate.
        window_size: tokens ``W`` before the present chunk that stay exact beside the dictionary, a
            multiple of ``chunk_size``: a chunk is absorbed once ``W`` further tokens are in.

    Raises:
        ValueError: a field out of its range, or one that its variant needs and lacks.

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922); what its summary leaves open is
    this project's reconstruction.
    """

    num_centroids: int
    chunk_size: int
    growth: Growth = "saturating"
    growth_length: int | None = None
    seeding: Seeding = "spread"
    seed: int = 0
    rate: Rate = "mean"
    step: float = 0.1
    centroid: Centroid = "mean"
    window_size: int = 0

    def __post_init__(self):
        whole = ["num_centroids", "chunk_size"]
        whole += ["growth_length"] if self.growth_length is not None else []
        for name in whole:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        named = {"growth": Growth, "seeding": Seeding, "rate": Rate, "centroid": Centroid}
        for name, choices in named.items():
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(f"{name} must be one of {get_args(choices)}, got {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if self.growth == "linear" and self.growth_length is None:
            raise ValueError("growth_length must be at least 1 with growth='linear', got None")
        if not isinstance(self.step, int | float) or not 0.0 <= self.step <= 1.0:
            raise ValueError(f"step must lie in [0, 1], got {self.step!r}")
        W, C = self.window_size, self.chunk_size
        if not isinstance(W, int) or isinstance(W, bool) or W < 0 or W % C:
            raise ValueError(
                f"window_size must be 0 or a positive multiple of chunk_size {C}, got {W!r}"
            )

    @property
    def tail_size(self) -> int:
        """Places for tokens that are not absorbed, of the window and of a chunk: ``L = W + C``."""
        return self.window_size + self.chunk_size

    def num_absorbed_after(self, num_tokens: int) -> int:
        """How many of a sequence's first ``num_tokens`` tokens are in the dictionary."""
        return max(0, num_tokens // self.chunk_size * self.chunk_size - self.window_size)

    def num_active_after(self, num_active: int, num_absorbed: int) -> int:
        """Active slots ``n'`` once ``num_absorbed`` tokens are in, ``num_active`` before the chunk.

        ``n' = max(n, min(n + C, N, max(1, schedule(t'))))``, in exact integer arithmetic.
        """
        t, capacity = num_absorbed, self.num_centroids
        if self.growth == "saturating":
            schedule = capacity * t // (t + capacity)
        elif self.growth == "linear":
            schedule = capacity * t // (self.growth_length or 1)
        else:
            schedule = min(capacity, t)
        return max(num_active, min(num_active + self.chunk_size, capacity, max(1, schedule)))


def on_grid(products: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The products rounded to the nearest multiple of 2^-16, as they are compared."""
    return torch.round(products * GRID) / GRID


def random_scores(
    positions: Int[Tensor, "*shape"], num_heads: int, seed: int
) -> Float[Tensor, "*shape G"]:
    """Seed scores of ``seeding="random"``: a hash of (seed, position, head), so that splits agree.

    Args:
        positions: of the tokens in their sequence, counted from 0.
        num_heads: key-value heads ``G``.
        seed: any integer.

    Returns:
        Multiples of 2^-24 in [0, 1), ``[..., G]`` float32: exact in every float type in use.
    """
    stream = (seed * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63  # of this seed, as an int64
    heads = torch.arange(num_heads, device=positions.device)
    mixed = positions[..., None] * num_heads + heads + stream
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (mixed >> 31) & 0xFFFFFF
    return bits.to(torch.float32) * 2.0**-24
