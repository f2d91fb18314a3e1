"""Hugging Face models over any pattern of mixers; importing this registers them with ``Auto*``."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("ovq.models needs transformers: pip install 'ovq[models]'") from error

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ovq.models.cache import OVQCache
from ovq.models.configuration_ovq import OVQConfig
from ovq.models.modeling_ovq import OVQForCausalLM, OVQModel
from ovq.models.regression import OVQForRegression, OVQRegressionConfig

AutoConfig.register("ovq", OVQConfig, exist_ok=True)
AutoModel.register(OVQConfig, OVQModel, exist_ok=True)
AutoModelForCausalLM.register(OVQConfig, OVQForCausalLM, exist_ok=True)
AutoConfig.register("ovq_regression", OVQRegressionConfig, exist_ok=True)
AutoModel.register(OVQRegressionConfig, OVQForRegression, exist_ok=True)

__all__ = [
    "OVQCache",
    "OVQConfig",
    "OVQForCausalLM",
    "OVQForRegression",
    "OVQModel",
    "OVQRegressionConfig",
]
