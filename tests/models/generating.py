"""What the tests of ``generate()`` share."""

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ovq.models import OVQForCausalLM

# One of every kind of memory.
KINDS = [
    ["ovq"],
    ["sliding_window", "ovq"],
    ["full_attention"],
    ["mamba2"],
    ["gated_delta_net"],
    ["vq"],
]
PATTERNS = [
    *KINDS,
    ["full_attention_nope", "sliding_window"],
    ["vq_static_values", "linear_attention"],
    ["linear_attention_normalized", "sliding_window"],
    ["mesa_net", "sliding_window"],
]


def generate(model: OVQForCausalLM, prompt: Tensor | None = None, num_new: int = 20, **options):
    """Greedy, without padding, unless the options say otherwise; ``pad_token_id`` 0."""
    options = {"do_sample": False, "pad_token_id": 0} | options
    if prompt is not None:  # without a mask, a 0 that was generated counts as padding
        options = {"attention_mask": torch.ones_like(prompt)} | options
    return model.generate(prompt, max_new_tokens=num_new, **options)


def argmax_loop(model: OVQForCausalLM, prompt: Tensor, num_new: int = 20) -> Tensor:
    """Greedy decoding by hand, without a cache."""
    for _ in range(num_new):
        prompt = torch.cat([prompt, model(prompt, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return prompt


def left_padded(rows: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The rows with zeros before their starts, and the mask of what is left."""
    mask = (torch.arange(rows.shape[1]) >= torch.tensor(starts)[:, None]).long()
    return rows * mask, mask


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Token ``i`` is the ``i``-th of 61 printable characters."""
    vocab = {chr(65 + index): index for index in range(61)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="A")
