"""A codebook learned by training: k-means of the vectors seen, in exponential moving averages."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, distributed, nn

from ovq.ops.decay import without_autocast
from ovq.ops.quantization import nearest_codes, quantized

DECAY = 0.99
DEAD_AFTER = round(1 / (1 - DECAY))  # training forwards: the span that the averages reach back
SMOOTHING = 1e-8  # Laplace's, beside shares that sum to one
# 2^32 divided by the golden ratio: multiples of it are spread evenly, and repeat no small period.
SPREAD = 0x9E3779B1


@dataclass(frozen=True, kw_only=True)
class BatchStatistics:
    """What a codebook learns from some vectors.

    Attributes:
        sums: ``[G, S, K]``, of the vectors that joined each code.
        counts: ``[G, S]``, their number.
        seeds: ``[G, S, K]``, one of the vectors for each code, to take its place if it is dead.
        squared_errors: ``[G]``, the sum of the squared distances to the codes.
        squared_norms: ``[G]``, the sum of the squared norms.
    """

    sums: Float[Tensor, "G S K"]
    counts: Float[Tensor, "G S"]
    seeds: Float[Tensor, "G S K"]
    squared_errors: Float[Tensor, " G"]
    squared_norms: Float[Tensor, " G"]

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "B T G K"],
        codes: Float[Tensor, "G S K"],
        assigned: Int[Tensor, "B T G"],
    ) -> "BatchStatistics":
        """The statistics of vectors and the codes they joined."""
        errors = x - quantized(x, codes, assigned)
        of_head, members = x.flatten(0, 1).movedim(1, 0), assigned.flatten(0, 1).T[..., None]
        S, num_vectors = codes.shape[1], of_head.shape[1]
        order = torch.arange(1, S + 1, device=x.device) * SPREAD % 2**32
        places = order * num_vectors >> 32
        return cls(
            sums=torch.zeros_like(codes).scatter_add(1, members.expand_as(of_head), of_head),
            counts=torch.zeros_like(codes[..., :1]).scatter_add(
                1, members, torch.ones_like(members, dtype=codes.dtype)
            )[..., 0],
            seeds=of_head[:, places] if num_vectors else torch.zeros_like(codes),
            squared_errors=errors.square().sum((0, 1, 3)),
            squared_norms=x.square().sum((0, 1, 3)),
        )

    def plus(self, other: "BatchStatistics") -> "BatchStatistics":
        """The statistics of both; the seeds are this one's."""
        return BatchStatistics(
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
            seeds=self.seeds,
            squared_errors=self.squared_errors + other.squared_errors,
            squared_norms=self.squared_norms + other.squared_norms,
        )

    def over_all_processes(self) -> "BatchStatistics":
        """The sum over the processes that train together, with the seeds of the first."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return self
        seeds = self.seeds if distributed.get_rank() == 0 else torch.zeros_like(self.seeds)
        parts = [self.sums, self.counts, seeds, self.squared_errors, self.squared_norms]
        flat = torch.cat([part.flatten() for part in parts])
        distributed.all_reduce(flat)
        split = flat.split([part.numel() for part in parts])
        summed = [new.view_as(part) for new, part in zip(split, parts, strict=True)]
        return BatchStatistics(
            sums=summed[0],
            counts=summed[1],
            seeds=summed[2],
            squared_errors=summed[3],
            squared_norms=summed[4],
        )


@dataclass(frozen=True, kw_only=True)
class CodebookHealth:
    """Whether a codebook is used, for each key-value head.

    Attributes:
        live_codes: ``[G]``, codes that some vector of the last 100 training forwards joined.
        perplexity: ``[G]``, of the average shares: ``S`` if all codes are used alike, 1 if one is.
        quantization_error: ``[G]``, the mean squared distance to the code, divided by the mean
            squared norm, in the last training forward; ``None`` before the first.
    """

    live_codes: Int[Tensor, " G"]
    perplexity: Float[Tensor, " G"]
    quantization_error: Float[Tensor, " G"] | None


class Codebook(nn.Module):
    """Codes ``[G, S, K]``, one codebook a key-value head, moved by averages and by no gradient.

    A training forward is quantized by ``codes`` and records what it saw. :meth:`end_forward` then
    takes the record into the moving averages of the vectors' sums and shares (decay 0.99);
    :meth:`begin_forward`, before the next, sets ``codes`` to their quotient. So nothing changes
    while a forward and its backward run, and activations that are computed twice, as gradient
    checkpointing does, meet the same codes twice and count once.

    A code that no vector has joined in 100 training forwards is dead, as all are at the start: each
    further forward puts it on another vector, until one joins. Which vector is a fixed function of
    the code's index and the number of vectors. Under ``torch.distributed`` the records of all
    processes are summed, so that their codebooks stay equal; they differ from one process's on the
    same vectors where codes are dead, since those are put on vectors of the first process.

    The buffers are in float32 at least, whatever the module is converted to.

    Args:
        num_heads: ``G``.
        num_codes: ``S``.
        dim: ``K``.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> codebook = Codebook(num_heads=1, num_codes=2, dim=1)
        >>> x = torch.tensor([-1.0, -1.0, 3.0, 3.0]).view(1, 4, 1, 1)
        >>> for _ in range(3):
        ...     codebook.begin_forward()
        ...     codebook.record(x, codebook.assign(x))
        ...     codebook.end_forward()
        >>> codebook.codes.flatten().sort().values.round(decimals=3).tolist()
        [-1.0, 3.0]

    Source: "Neural Discrete Representation Learning" (arXiv 1711.00937), appendix A.1.
    """

    def __init__(self, num_heads: int, num_codes: int, dim: int):
        super().__init__()
        for name, size in (("num_heads", num_heads), ("num_codes", num_codes), ("dim", dim)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        real = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.codes: Tensor
        self.sums: Tensor
        self.shares: Tensor
        self.idle: Tensor
        self.register_buffer("codes", torch.empty(num_heads, num_codes, dim, dtype=real))
        self.register_buffer("sums", torch.empty(num_heads, num_codes, dim, dtype=real))
        self.register_buffer("shares", torch.empty(num_heads, num_codes, dtype=real))
        self.register_buffer("idle", torch.empty(num_heads, num_codes, dtype=torch.int64))
        self.recorded: BatchStatistics | None = None
        self.error: Tensor | None = None
        self.init_parameters()

    def init_parameters(self) -> None:
        """Codes of about unit norm in random directions, averages of nothing, all codes dead."""
        nn.init.normal_(self.codes, std=self.codes.shape[-1] ** -0.5)
        nn.init.zeros_(self.sums)
        nn.init.zeros_(self.shares)
        nn.init.constant_(self.idle, DEAD_AFTER)

    def assign(self, x: Float[Tensor, "B T G K"]) -> Int[Tensor, "B T G"]:
        """The nearest code of each vector."""
        return nearest_codes(x, self.codes)

    def commitment(
        self, x: Float[Tensor, "B T G K"], assigned: Int[Tensor, "B T G"]
    ) -> Float[Tensor, ""]:
        """The mean squared distance of the vectors to their codes, which pulls on the vectors."""
        x = x.to(self.codes.dtype)
        of_head = torch.arange(x.shape[2], device=x.device)
        distances = (x - self.codes[of_head, assigned].detach()).square().sum(-1)
        return distances.sum() / max(1, distances.numel())

    @torch.no_grad()
    def record(self, x: Float[Tensor, "B T G K"], assigned: Int[Tensor, "B T G"]) -> None:
        """Note what this forward saw; several calls add up."""
        with without_autocast(x.device):
            seen = BatchStatistics.of(x.detach().to(self.codes.dtype), self.codes, assigned)
        self.recorded = seen if self.recorded is None else self.recorded.plus(seen)

    @torch.no_grad()
    def begin_forward(self) -> None:
        """Set the codes to the averages, and forget what a backward has recorded once more."""
        self.recorded = None
        total = self.shares.sum(-1, keepdim=True)
        smoothed = (self.shares + SMOOTHING) / (total + self.shares.shape[-1] * SMOOTHING) * total
        learned = self.sums / smoothed[..., None]
        self.codes.copy_(torch.where(total[..., None] > 0, learned, self.codes))

    @torch.no_grad()
    def end_forward(self) -> None:
        """Take the record into the averages."""
        if self.recorded is None:
            return
        batch, self.recorded = self.recorded.over_all_processes(), None
        num_vectors = batch.counts.sum(-1, keepdim=True).clamp_min(1)
        shares = self.shares.lerp(batch.counts / num_vectors, 1 - DECAY)
        sums = self.sums.lerp(batch.sums / num_vectors[..., None], 1 - DECAY)
        idle = torch.where(batch.counts > 0, 0, (self.idle + 1).clamp_max(DEAD_AFTER))
        dead, start = idle == DEAD_AFTER, (1 - DECAY) / self.shares.shape[-1]
        self.shares.copy_(torch.where(dead, start, shares))
        self.sums.copy_(torch.where(dead[..., None], start * batch.seeds, sums))
        self.idle.copy_(idle)
        self.error = batch.squared_errors / batch.squared_norms.clamp_min(SMOOTHING)

    def health(self) -> CodebookHealth:
        """Whether the codes are used."""
        shares = self.shares / self.shares.sum(-1, keepdim=True).clamp_min(SMOOTHING)
        return CodebookHealth(
            live_codes=(self.idle < DEAD_AFTER).sum(-1),
            perplexity=torch.special.entr(shares).sum(-1).exp(),
            quantization_error=self.error,
        )

    def _apply(self, fn, recurse: bool = True):
        """Conversions reach the device alone where they would cut the averages' float32 short."""

        def kept(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if torch.promote_types(converted.dtype, torch.float32) == converted.dtype:
                return converted
            return converted if not tensor.is_floating_point() else tensor.to(converted.device)

        return super()._apply(kept, recurse)
