"""Random points in float64, the same in every run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Draw = Callable[..., Tensor]


@pytest.fixture
def normal() -> Draw:
    """Standard normal tensors of a given shape, one after the other."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def unit(normal: Draw) -> Draw:
    """Vectors of unit norm, uniform on the sphere."""
    return lambda *shape: torch.nn.functional.normalize(normal(*shape), dim=-1)
