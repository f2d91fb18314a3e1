"""Online k-means: against the operator's own update, against batch means, against hand work."""

import pytest
import torch

from ovq import DictionaryConfig
from ovq.ops.ovq_attention.reference import HeadDictionary, assign_to_centroids, update
from ovq.theory import (
    batch_means,
    chunked_means_are_batch_means,
    nearest_centroids,
    nearest_has_largest_product,
    online_kmeans_step,
    running_means_step,
)

PARTITIONS = [[24], [1] * 24, [5, 0, 12, 7]]


def test_three_points_by_hand():
    """Means 0 and 10 of 1 and 3 points; 4 and 2 join the first, 14 the second."""
    means, counts = torch.tensor([[0.0], [10.0]]).double(), torch.tensor([1, 3])
    means, counts = online_kmeans_step(means, counts, torch.tensor([[4.0], [14.0], [2.0]]).double())
    assert means.tolist() == [[2.0], [11.0]]
    assert counts.tolist() == [3, 4]


@pytest.mark.parametrize("rate", ["mean", "constant"])
def test_the_step_is_the_operators_update(normal, unit, rate):
    """With means of one norm, for which the nearest and the largest product are the same."""
    means, values, counts = unit(5, 4), normal(5, 3), torch.tensor([3, 1, 4, 1, 5])
    keys, new_values = unit(8, 4), normal(8, 3)
    config = DictionaryConfig(num_centroids=5, chunk_size=8, rate=rate, step=0.3)
    head, no_seed = HeadDictionary(means, values, counts), torch.zeros(0, dtype=torch.int64)
    slots = assign_to_centroids(keys, head, no_seed, config)
    after = update(head, keys, new_values, slots, config)
    assert slots.tolist() == nearest_centroids(keys, means).tolist()
    step = None if rate == "mean" else 0.3
    for before, tokens, operators in (
        (means, keys, after.keys),
        (values, new_values, after.values),
    ):
        moved, grown = running_means_step(before, counts, tokens, slots, step=step)
        torch.testing.assert_close(moved, operators)
        assert grown.tolist() == after.counts.tolist()
    if rate == "mean":
        torch.testing.assert_close(online_kmeans_step(means, counts, keys)[0], after.keys)


def test_the_chunk_meets_the_means_as_they_stood_before_it():
    """Point by point 4 would pull the first mean to 2, and 5.5 would go there."""
    means, counts = torch.tensor([[0.0], [10.0]]).double(), torch.tensor([1, 1])
    chunk = torch.tensor([[4.0], [5.5]]).double()
    at_once = online_kmeans_step(means, counts, chunk)[1]
    assert at_once.tolist() == [2, 2]
    for point in chunk:
        means, counts = online_kmeans_step(means, counts, point[None])
    assert counts.tolist() == [3, 1]


def test_nearest_is_the_largest_product_for_one_norm_alone(normal, unit):
    points, means = normal(200, 4), unit(6, 4)
    assert nearest_has_largest_product(points, 3 * means).gap == 0
    stretched = means * torch.linspace(0.3, 1, 6).double()[:, None]
    sides = nearest_has_largest_product(points, stretched)
    assert (sides.left != sides.right).double().mean() > 0.1


@pytest.mark.parametrize("chunk_sizes", PARTITIONS, ids=["one", "each", "some"])
def test_any_chunks_give_the_batch_means_at_the_rate_of_the_mean(normal, chunk_sizes):
    points, slots = normal(24, 3), torch.arange(24) % 7 % 4
    assert chunked_means_are_batch_means(points, slots, 4, chunk_sizes).gap < 1e-12


def test_a_constant_rate_gives_other_means_and_another_for_each_chunking(normal):
    points, slots = normal(24, 3), torch.arange(24) % 7 % 4
    sides = [
        chunked_means_are_batch_means(points, slots, 4, sizes, step=0.5) for sizes in PARTITIONS
    ]
    assert sides[0].gap < 1e-12  # the first chunk sets the mean at any rate
    assert min(sides[1].gap, sides[2].gap) > 0.1
    assert (sides[1].left - sides[2].left).abs().max() > 0.1
    assert all(torch.equal(s.left[:, -1], s.right[:, -1]) for s in sides)  # counts: no rate


def test_at_one_distance_the_product_prefers_the_longer_mean(normal, unit):
    points = normal(50, 4)
    means = points[0] + 2 * unit(6, 4)  # all at distance 2 of the first point
    sides = nearest_has_largest_product(points[:1], means[means.norm(dim=-1).argsort()])
    assert sides.right.tolist() == [5]


def test_what_names_no_slot_or_no_chunks_raises(normal):
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 2\), got \[0, 1, 2\]"):
        batch_means(normal(3, 2), torch.tensor([0, 1, 2]), 2)
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 2\), got \[0, 1, -1\]"):
        batch_means(normal(3, 2), torch.tensor([0, 1, -1]), 2)
    for sizes in ([1, 1], [4, -1]):
        with pytest.raises(ValueError, match="chunk_sizes must add up to 3"):
            chunked_means_are_batch_means(normal(3, 2), torch.tensor([0, 1, 1]), 2, sizes)


def test_a_slot_without_points_has_no_mean(normal):
    with pytest.raises(ValueError, match=r"each of 3 slots, got counts \[2, 0, 0\]"):
        batch_means(normal(2, 3), torch.tensor([0, 0]), 3)
