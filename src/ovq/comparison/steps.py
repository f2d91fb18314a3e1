"""The calls that are measured: a forward, a training step, and decoding after a prompt."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from ovq.models import OVQForCausalLM
from ovq.models.modeling_ovq import CACHE_FIELD

PILOT = 512  # tokens of a step that warms up


def run_forward(model: OVQForCausalLM, ids: Int[Tensor, "1 T"]) -> None:
    """A forward in evaluation."""
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def run_training_step(model: OVQForCausalLM, ids: Int[Tensor, "1 T"]) -> None:
    """A forward in training, the loss of the next tokens, and the backward."""
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def decoding(
    model: OVQForCausalLM, prompt: Int[Tensor, "1 T"], following: Int[Tensor, "1 R"]
) -> Callable[[], None]:
    """A call that decodes the following tokens, one by one, after the prompt, which is read now."""
    model.eval()
    start = getattr(model(input_ids=prompt, use_cache=True, logits_to_keep=1), CACHE_FIELD)

    @torch.no_grad()
    def decode() -> None:
        cache = start
        for token in following.split(1, dim=1):
            cache = getattr(model(input_ids=token, cache=cache, use_cache=True), CACHE_FIELD)

    return decode
