"""Every mixer on equal terms: models of equal size, their state, operations, speed and memory."""

from ovq.comparison.measure import ComparisonConfig, compare, read_comparison
from ovq.comparison.models import equal_models

__all__ = ["ComparisonConfig", "compare", "equal_models", "read_comparison"]
