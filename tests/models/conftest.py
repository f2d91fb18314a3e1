"""Small models with random weights, large enough that another token changes the argmax."""

import pytest
import torch

from ovq.layers.registry import WITH_SHORT_CONV
from ovq.models import OVQConfig, OVQForCausalLM


@pytest.fixture
def make_model():
    """A function from changed fields to a model in evaluation mode, the same weights each time."""

    def make(**changes) -> OVQForCausalLM:
        fields = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_pattern": ["sliding_window", "ovq"],
            "window_size": 5,
            "dictionary": {"num_centroids": 6, "chunk_size": 4},
            "num_codes": 7,
            "block_size": 3,
            "initializer_range": 0.3,
        }
        fields |= changes
        if not WITH_SHORT_CONV & set(fields["layer_pattern"]):
            fields["use_short_conv"] = False
        torch.manual_seed(0)
        return OVQForCausalLM(OVQConfig(**fields)).eval()

    return make


@pytest.fixture
def token_ids() -> torch.Tensor:
    return torch.randint(1, 61, (3, 23), generator=torch.Generator().manual_seed(0))
