"""The two sides of a statement, each computed from its own definition."""

from dataclasses import dataclass

from jaxtyping import Shaped
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What a statement of this package returns: equal where its assumptions hold.

    Attributes:
        left: the left side, any shape.
        right: the right side, the same shape.

    Example:
        >>> Sides(left=torch.ones(2), right=torch.tensor([1.0, 0.5])).gap
        0.5
    """

    left: Shaped[Tensor, "*shape"]
    right: Shaped[Tensor, "*shape"]

    @property
    def gap(self) -> float:
        """The largest absolute difference of the two sides."""
        return float((self.left - self.right).abs().max())
