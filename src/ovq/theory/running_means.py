"""The dictionary's update is online k-means: hard assignments and running means."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ovq.theory.kernel_regression import squared_distances
from ovq.theory.sides import Sides


def nearest_centroids(
    points: Float64[Tensor, "P K"], means: Float64[Tensor, "N K"]
) -> Int[Tensor, " P"]:
    """The slot of the nearest mean of each point; ties go to the lower slot.

    Args:
        points: ``[P, K]``.
        means: ``[N, K]``.

    Returns:
        ``[P]`` int64.

    Example:
        >>> nearest_centroids(torch.tensor([[0.9]]).double(), torch.tensor([[0.0], [1.0]]).double())
        tensor([1])
    """
    return squared_distances(points, means).argmin(-1)


def nearest_has_largest_product(
    points: Float64[Tensor, "P K"], means: Float64[Tensor, "N K"]
) -> Sides:
    """The nearest mean is the one of the largest inner product, **if all means have one norm**.

    OVQ assigns by the product. Of two means at one distance it then prefers the longer.

    Args:
        points: ``[P, K]``, any norms.
        means: ``[N, K]``.

    Returns:
        Slots by distance on the left, by product on the right, ``[P]`` int64.

    Example:
        >>> points, means = torch.randn(2, 6, 4, dtype=torch.float64)
        >>> nearest_has_largest_product(points, torch.nn.functional.normalize(means, dim=-1)).gap
        0.0
    """
    return Sides(left=nearest_centroids(points, means), right=(points @ means.mT).argmax(-1))


def running_means_step(
    means: Float64[Tensor, "N K"],
    counts: Int[Tensor, " N"],
    points: Float64[Tensor, "P K"],
    slots: Int[Tensor, " P"],
    *,
    step: float | None = None,
) -> tuple[Float64[Tensor, "N K"], Int[Tensor, " N"]]:
    """Points join their slots: ``D + (sum(members) - n D) / c'`` with ``c' = c + n``.

    Args:
        means: ``D``, ``[N, K]``; of no consequence where the count is 0.
        counts: ``c``, ``[N]``, points that joined before.
        points: ``[P, K]``.
        slots: the slot of each point, ``[P]``.
        step: ``None`` for the rate ``1 / c'``; otherwise a constant step toward the mean of the
            members in slots that had points before, as ``rate="constant"`` of the operator.

    Returns:
        The means and counts after the step. Slots that no point joins keep theirs.

    Example:
        >>> means, counts = torch.tensor([[2.0], [7.0]]).double(), torch.tensor([1, 1])
        >>> points = torch.tensor([[5.0], [5.0]]).double()
        >>> means, counts = running_means_step(means, counts, points, torch.tensor([0, 0]))
        >>> means.tolist(), counts.tolist()
        ([[4.0], [7.0]], [3, 1])

    Source: MacQueen 1967, "Some methods for classification and analysis of multivariate
    observations", for the running mean.
    """
    joined = slots == torch.arange(len(counts), device=slots.device)[:, None]  # [N, P]
    members = joined.sum(-1)
    grown = counts + members
    rate = 1 / grown.clamp_min(1).to(means)
    if step is not None:
        rate = torch.where(counts > 0, step / members.clamp_min(1), rate)
    moves = joined.to(points) @ points - members[:, None] * means
    return means + rate[:, None] * moves, grown


def online_kmeans_step(
    means: Float64[Tensor, "N K"], counts: Int[Tensor, " N"], chunk: Float64[Tensor, "C K"]
) -> tuple[Float64[Tensor, "N K"], Int[Tensor, " N"]]:
    """One step of online batch k-means: the chunk's points join their nearest means, all at once.

    Args:
        means: ``[N, K]``, as they stood before the chunk.
        counts: ``[N]``, points that joined before.
        chunk: ``[C, K]``.

    Returns:
        The means and counts after the chunk.

    Example:
        >>> means, counts = torch.tensor([[0.0], [8.0]]).double(), torch.tensor([1, 1])
        >>> means, counts = online_kmeans_step(means, counts, torch.tensor([[3.0], [4.5]]).double())
        >>> means.tolist(), counts.tolist()
        ([[1.5], [6.25]], [2, 2])

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922); by distance, where OVQ compares
    inner products: see :func:`nearest_has_largest_product`.
    """
    return running_means_step(means, counts, chunk, nearest_centroids(chunk, means))


def batch_means(
    points: Float64[Tensor, "P K"], slots: Int[Tensor, " P"], num_slots: int
) -> tuple[Float64[Tensor, "N K"], Int[Tensor, " N"]]:
    """The mean and the number of the points of each slot, all points at once.

    Args:
        points: ``[P, K]``.
        slots: the slot of each point, ``[P]``.
        num_slots: ``N``.

    Returns:
        Means ``[N, K]`` and counts ``[N]``.

    Raises:
        ValueError: a slot without points, which has no mean, or one that is not there.

    Example:
        >>> points, slots = torch.tensor([[1.0], [5.0], [3.0]]).double(), torch.tensor([1, 0, 1])
        >>> [x.tolist() for x in batch_means(points, slots, 2)]
        [[[5.0], [2.0]], [1, 2]]
    """
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise ValueError(f"slots must lie in [0, {num_slots}), got {slots.tolist()}")
    members = [points[slots == m] for m in range(num_slots)]
    counts = torch.tensor([len(x) for x in members])
    if (counts == 0).any():
        raise ValueError(f"slots must name each of {num_slots} slots, got counts {counts.tolist()}")
    return torch.stack([x.mean(0) for x in members]), counts


def chunked_means_are_batch_means(
    points: Float64[Tensor, "P K"],
    slots: Int[Tensor, " P"],
    num_slots: int,
    chunk_sizes: Sequence[int],
    *,
    step: float | None = None,
) -> Sides:
    """Running means are the means of all points so far, whatever the chunks, **at the rate 1/c**.

    The assignment is given: in OVQ the chunks decide which slots the points join, and nothing else.

    Args:
        points: ``[P, K]``.
        slots: the slot of each point, ``[P]``; each slot has points.
        num_slots: ``N``.
        chunk_sizes: how the points are cut; their sum is ``P``.
        step: ``None`` for the rate ``1 / c``; a constant step forgets, and is no mean.

    Returns:
        Means and, in the last column, counts ``[N, K + 1]``: chunk by chunk on the left, all at
        once on the right.

    Raises:
        ValueError: as :func:`batch_means`; sizes that do not add up to ``P``.

    Example:
        >>> points, slots = torch.randn(6, 2, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 1])
        >>> chunked_means_are_batch_means(points, slots, 2, [1, 3, 2]).gap < 1e-12
        True
    """
    if sum(chunk_sizes) != len(points) or min(chunk_sizes, default=0) < 0:
        raise ValueError(f"chunk_sizes must add up to {len(points)}, got {list(chunk_sizes)}")
    means = points.new_zeros(num_slots, points.shape[-1])
    counts = torch.zeros(num_slots, dtype=torch.int64)
    sizes = list(chunk_sizes)
    for chunk, joined in zip(points.split(sizes), slots.split(sizes), strict=True):
        means, counts = running_means_step(means, counts, chunk, joined, step=step)
    batch, total = batch_means(points, slots, num_slots)
    return Sides(
        left=torch.cat([means, counts[:, None].to(means)], dim=-1),
        right=torch.cat([batch, total[:, None].to(batch)], dim=-1),
    )
