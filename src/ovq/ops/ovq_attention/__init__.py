"""Online vector-quantized attention: the operator, its configuration and its state."""

from ovq.ops.ovq_attention.api import ovq_attention
from ovq.ops.ovq_attention.diagnostics import (
    Diagnostics,
    QuantizationError,
    diagnose,
    error_of_unit_keys,
    num_active_by_chunk,
    quantization_error,
    read_weights,
)
from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.ovq_attention.state import OVQState

__all__ = [
    "Diagnostics",
    "DictionaryConfig",
    "OVQState",
    "QuantizationError",
    "diagnose",
    "error_of_unit_keys",
    "num_active_by_chunk",
    "ovq_attention",
    "quantization_error",
    "read_weights",
]
