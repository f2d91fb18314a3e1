"""A pretrained Llama-type model with other mixers in the place of its attention."""

from ovq.conversion.layers import LAYERS, LayerPlan, layer_fields, parse_pattern
from ovq.conversion.run import Conversion, convert_to_run
from ovq.conversion.weights import convert, converted_config

__all__ = [
    "LAYERS",
    "Conversion",
    "LayerPlan",
    "convert",
    "convert_to_run",
    "converted_config",
    "layer_fields",
    "parse_pattern",
]
