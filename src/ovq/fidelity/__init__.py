"""How far a constant memory is from full attention, on given queries, keys and values."""

from ovq.fidelity.distributions import DISTRIBUTIONS, Sample, random_keys, zipf_keys
from ovq.fidelity.measure import FidelityConfig, measure, relative_error
from ovq.fidelity.methods import METHODS, Method

__all__ = [
    "DISTRIBUTIONS",
    "METHODS",
    "FidelityConfig",
    "Method",
    "Sample",
    "measure",
    "random_keys",
    "relative_error",
    "zipf_keys",
]
