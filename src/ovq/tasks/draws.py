"""Random draws that tasks share, all of them uniform and without loops over the tokens."""

import torch
from jaxtyping import Int64
from torch import Tensor


def draw_places(
    generator: torch.Generator, length: int, num_items: int, width: int
) -> Int64[Tensor, "P L"]:
    """Positions of the tokens of every item, all placements without overlap equally likely.

    Args:
        generator: the source of randomness.
        length: tokens of the stretch.
        num_items: items ``P``, of which ``num_items * width`` tokens fit into it.
        width: tokens ``L`` of each.

    >>> draw_places(torch.Generator().manual_seed(0), 7, num_items=3, width=2).tolist()
    [[0, 1], [2, 3], [5, 6]]
    """
    # Shrunk to one token each, items are a subset of what remains of the stretch.
    shrunk = length - num_items * (width - 1)
    starts = torch.randperm(shrunk, generator=generator)[:num_items].sort().values
    starts += torch.arange(num_items) * (width - 1)
    return starts[:, None] + torch.arange(width)


def draw_numerals(
    generator: torch.Generator, count: int, base: int, num_digits: int
) -> Int64[Tensor, "P L"]:
    """Different numerals of so many digits in a base, drawn uniformly without replacement.

    Args:
        generator: the source of randomness.
        count: numerals ``P``, at most ``base ** num_digits``.
        base: digits there are.
        num_digits: digits ``L`` of each.
    """
    num_possible = base**num_digits
    if num_possible <= max(4096, 4 * count):
        codes = torch.randperm(num_possible, generator=generator)[:count]
        return codes[:, None] // base ** torch.arange(num_digits) % base
    numerals: dict[tuple[int, ...], None] = {}  # a set that keeps the order of the draws
    while len(numerals) < count:
        draws = torch.randint(base, (count, num_digits), generator=generator).tolist()
        numerals |= dict.fromkeys(map(tuple, draws))
    return torch.tensor(list(numerals)[:count], dtype=torch.int64).view(count, num_digits)


def draw_distinct(
    generator: torch.Generator, num_rows: int, count: int, size: int
) -> Int64[Tensor, "R P"]:
    """In each row, different numbers of ``[0, size)`` in random order, all choices equally likely.

    Args:
        generator: the source of randomness.
        num_rows: rows ``R``.
        count: numbers ``P`` in a row, at most ``size``.
        size: numbers there are.
    """
    chosen = torch.empty(num_rows, 0, dtype=torch.int64)
    for number in range(count):
        # The rank of the new number among those not chosen yet.
        new = torch.randint(size - number, (num_rows, 1), generator=generator)
        for earlier in chosen.sort(dim=1).values.unbind(dim=1):
            new += new >= earlier[:, None]
        chosen = torch.cat([chosen, new], dim=1)
    return chosen
