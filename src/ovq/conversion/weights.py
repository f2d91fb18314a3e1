"""The weights of a Llama-type model of transformers in a model of ours, layer by layer."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ovq.conversion.layers import CHUNK, LayerPlan, layer_fields
from ovq.models import OVQConfig, OVQForCausalLM

_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "initializer_range",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# The rule that loses least on keys of a pretrained model before RoPE (results/fidelity).
RULE = {"seeding": "novel", "centroid": "direction"}
# What a model may say and still be of the type: attention and feed-forward block as ours are.
_PLAIN = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
}


def converted_config(
    source: Any,
    layers: Sequence[LayerPlan],
    *,
    num_first_tokens: int = 4,
    share_of_slots: float = 0.25,
    distance: int = 2048,
) -> OVQConfig:
    """The configuration of a model with the weights of another and mixers of our own.

    Args:
        source: the configuration of a Llama-type model of transformers.
        layers: repeated over those of the source.
        num_first_tokens: tokens at the start that stay exact for good.
        share_of_slots: of the bytes of windowed OVQ layers, what goes to their dictionaries.
        distance: tokens between a query and the dictionary, for its rotary embedding.

    Raises:
        ValueError: a source of another type, more layers than it has, or a size out of its range.
    """
    for name, allowed in _PLAIN.items():
        value = getattr(source, name, None)
        if value not in allowed:
            raise ValueError(
                f"SOURCE must be a Llama-type model with {name} among {allowed}, got {value!r}"
            )
    rope = getattr(source, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"SOURCE must have plain rotary positions, got rope_type {rope['rope_type']!r}"
        )
    if len(layers) > source.num_hidden_layers:
        raise ValueError(
            f"pattern must have at most the {source.num_hidden_layers} layers of SOURCE, got "
            f"{len(layers)}"
        )
    head_dim = getattr(source, "head_dim", None) or (
        source.hidden_size // source.num_attention_heads
    )
    sizes = {
        "num_first_tokens": num_first_tokens,
        "share_of_slots": share_of_slots,
        "head_dim": head_dim,
    }
    own = {
        "layer_pattern": [layer.name for layer in layers],
        "layer_fields": [layer_fields(layer, **sizes) for layer in layers],
        "dictionary": {"num_centroids": 1, "chunk_size": CHUNK} | RULE,
        "num_first_tokens": num_first_tokens,
        "dictionary_distance": distance,
    }
    same: dict[str, Any] = {name: getattr(source, name, None) for name in _SAME}
    try:
        return OVQConfig(
            **same,
            **own,
            head_dim=head_dim,
            rope_theta=float(rope["rope_theta"]),
            max_rotary_position=source.max_position_embeddings - 1,
        )
    except (StrictDataclassError, TypeError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"SOURCE must have a Llama-type configuration, got {reason}") from None


def convert(source: Any, config: OVQConfig) -> OVQForCausalLM:
    """A model of that configuration with the weights of the source, in their dtype.

    Biases of dictionaries, which the source has none of, are zeros.

    Args:
        source: a Llama-type causal language model of transformers.
        config: of :func:`converted_config`.

    Raises:
        ValueError: weights that are not those of the type.
    """
    renamed = {
        name.replace(".self_attn.", ".mixer."): tensor
        for name, tensor in source.state_dict().items()
    }
    head = renamed.get("lm_head.weight")
    same = head is None or torch.equal(head, renamed["model.embed_tokens.weight"])
    if config.tie_word_embeddings and not same:
        config = deepcopy(config)  # transformers keeps both, whatever the configuration says
        config.tie_word_embeddings = False
    with torch.device("meta"):  # whose weights are all replaced
        model = OVQForCausalLM(config)
    own = model.state_dict()
    for name, tensor in own.items():
        if name.endswith(".dictionary_bias"):
            renamed[name] = torch.zeros(tensor.shape, dtype=source.dtype, device=source.device)
    unlike = {
        name for name in own.keys() & renamed.keys() if own[name].shape != renamed[name].shape
    }
    unlike |= own.keys() ^ renamed.keys()
    if unlike:
        raise ValueError(f"SOURCE must have the weights of a Llama-type model, got {min(unlike)}")
    model.load_state_dict({n: t.clone() for n, t in renamed.items()}, assign=True)
    model.tie_weights()
    model.generation_config = deepcopy(source.generation_config)
    return model.eval()
