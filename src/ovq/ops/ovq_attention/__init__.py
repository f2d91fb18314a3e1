"""Online vector-quantized attention: the operator, its configuration and its state."""

from ovq.ops.ovq_attention.api import ovq_attention
from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.ovq_attention.state import OVQState

__all__ = ["DictionaryConfig", "OVQState", "ovq_attention"]
