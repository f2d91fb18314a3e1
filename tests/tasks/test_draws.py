"""Draws that tasks share, and vocabularies."""

import pytest
import torch

from ovq.tasks.alphabets import Vocabulary
from ovq.tasks.draws import draw_distinct, draw_numerals, draw_places


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("num_items", "width"), [(0, 2), (1, 1), (5, 3), (30, 1), (10, 3)])
def test_places_do_not_overlap(num_items, width):
    for seed in range(20):
        places = draw_places(generator(seed), 30, num_items, width)
        assert places.shape == (num_items, width)
        assert (places - places[:, :1] == torch.arange(width)).all()
        flat = places.flatten()
        assert len(flat.unique()) == num_items * width
        assert flat.tolist() == sorted(flat.tolist())
        assert ((flat >= 0) & (flat < 30)).all()


@pytest.mark.parametrize(
    ("count", "base", "num_digits"), [(9, 3, 2), (1, 7, 1), (0, 5, 3), (100, 10, 9), (4000, 16, 4)]
)
def test_numerals_differ(count, base, num_digits):
    numerals = draw_numerals(generator(), count, base, num_digits)
    assert numerals.shape == (count, num_digits)
    assert len(numerals.unique(dim=0)) == count
    assert ((numerals >= 0) & (numerals < base)).all()


def test_distinct_numbers_are_all_ordered_choices_equally_often():
    rows = draw_distinct(generator(), 12_000, 2, 4)
    choices, counts = rows.unique(dim=0, return_counts=True)
    assert len(choices) == 12
    assert (choices[:, 0] != choices[:, 1]).all()
    assert (counts - 1000).abs().max() < 150
    whole = draw_distinct(generator(), 50, 9, 9)
    assert (whole.sort(dim=1).values == torch.arange(9)).all()


def test_vocabulary_is_end_to_end():
    vocabulary = Vocabulary(("<pad>", "?"), {"k": 3, "v": 2})
    assert vocabulary.size == 7
    assert vocabulary.bounds("k") == (2, 5)
    assert vocabulary.bounds("v") == (5, 7)
    ids = torch.arange(7)
    assert vocabulary.decode(ids) == "<pad> ? k0 k1 k2 v0 v1"
    assert torch.equal(vocabulary.encode(vocabulary.decode(ids)), ids)
    assert vocabulary.contains("v", ids).tolist() == [False] * 5 + [True] * 2
    drawn = vocabulary.draw("v", (3, 40), generator())
    assert drawn.shape == (3, 40)
    assert drawn.unique().tolist() == [5, 6]
    with pytest.raises(KeyError):
        vocabulary.bounds("f")
    with pytest.raises(ValueError, match=r"names k0 to k2, v0 to v1, \? and <pad>, got 'f0'"):
        vocabulary.encode("k0 f0")
