"""Fit the few numbers that a converted model has of its own to what the source predicts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ovq.models import OVQForCausalLM

OWN = ".dictionary_bias"

# Called with steps done, steps in all and the divergence in nats a token.
Progress = Callable[[int, int, float], None]


def windows(ids: Int[Tensor, " T"], length: int, num_windows: int) -> Iterator[Int[Tensor, " L"]]:
    """Pieces of a text, spread evenly over it.

    Raises:
        ValueError: the text is shorter than one piece.
    """
    if len(ids) < length:
        raise ValueError(f"text must have at least {length:,} tokens, got {len(ids):,}")
    starts = torch.linspace(0, len(ids) - length, num_windows).long().tolist()
    for start in starts:
        yield ids[start : start + length]


def divergence(
    model: OVQForCausalLM, source: Any, ids: Int[Tensor, " L"], first: int
) -> Float[Tensor, ""]:
    """The mean Kullback-Leibler divergence of a model's predictions from the source's, in nats.

    Args:
        model: the converted one; gradients reach it.
        source: the model that it was.
        ids: what both read, ``[L]``.
        first: predictions before this token are left out, where both see all there is.
    """
    keep = torch.arange(first, len(ids), device=model.device)
    inputs = ids[None].to(model.device)
    with torch.no_grad():
        wanted = source(inputs, logits_to_keep=keep, use_cache=False).logits.log_softmax(-1)
    found = model(inputs, logits_to_keep=keep, use_cache=False).logits.log_softmax(-1)
    return nn.functional.kl_div(found[0], wanted[0], log_target=True, reduction="batchmean")


def distill(
    model: OVQForCausalLM,
    source: Any,
    pieces: Iterator[Int[Tensor, " L"]],
    *,
    num_steps: int,
    first: int,
    learning_rate: float = 0.1,
    progress: Progress | None = None,
) -> list[float]:
    """Fit the dictionaries' biases, a number a head; all other weights stay the source's.

    Args:
        model: converted, with windowed OVQ layers; changed in place.
        source: the model that it was.
        pieces: what is read, one a step; longer than the window.
        num_steps: of Adam, its rate falling linearly to zero.
        first: predictions before this token are left out.
        learning_rate: at the start.
        progress: called after every step.

    Returns:
        The divergence at each step.

    Raises:
        ValueError: a model without dictionaries.
    """
    own = [p for name, p in model.named_parameters() if name.endswith(OWN)]
    if not own:
        raise ValueError("pattern must hold windowed_ovq for a distillation, got none")
    model.requires_grad_(False)
    for parameter in own:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(own, lr=learning_rate, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    found: list[float] = []
    for step, ids in enumerate(pieces, start=1):
        optimizer.zero_grad()
        loss = divergence(model, source, ids, first)
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item())
        if progress is not None:
            progress(step, num_steps, found[-1])
    model.requires_grad_(True)
    return found
