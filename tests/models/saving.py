"""What the tests of models in files share."""

from collections.abc import Callable

import torch
from torch import Tensor

from ovq.layers import MIXERS
from ovq.models import OVQForCausalLM

HYBRID = ["sliding_window", "ovq"]
ALL = {"layer_pattern": list(MIXERS), "num_hidden_layers": len(MIXERS)}

# Past the window, and some chunks.
IDS = torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(0))


def trained(make_model: Callable[..., OVQForCausalLM], **changes) -> OVQForCausalLM:
    """A model of which no parameter, and no code, is what it started as."""
    model = make_model(**({"use_short_conv": True} | changes)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        for _ in range(2):
            model(IDS)
    return model.eval()


def assert_same(loaded: OVQForCausalLM, model: OVQForCausalLM, ids: Tensor = IDS):
    """All tensors, and the logits of many tokens and of one, to the bit."""
    assert type(loaded) is type(model)
    found, expected = loaded.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name
    with torch.no_grad():
        for some in (ids, ids[:1, :1]):
            assert loaded.eval()(some).logits.equal(model(some).logits)
    tied = [m.lm_head.weight is m.model.embed_tokens.weight for m in (loaded, model)]
    assert tied[0] == tied[1] == model.config.tie_word_embeddings
