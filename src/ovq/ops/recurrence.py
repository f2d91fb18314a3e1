"""How an operator with one memory a head runs: by its step, token by token, or in chunks."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.ops.decay import without_autocast
from ovq.ops.inputs import check_shape

Inputs = tuple[Tensor, ...]
# From the memory and one token of each input to its output and the memory after it.
Step = Callable[..., tuple[Tensor, Tensor]]
# From the memory, all inputs and the tokens in a chunk to all outputs and the memory after them.
Chunked = Callable[[Tensor, Inputs, int], tuple[Tensor, Tensor]]


def run_in_chunks(
    step: Step,
    chunked: Chunked,
    h: Float[Tensor, "B H K F"],
    inputs: Inputs,
    values: Float[Tensor, "B T H V"],
    chunk_size: int,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K F"]]:
    """All tokens by the chunk form, a single one by its step; output like the values.

    Raises:
        ValueError: ``chunk_size < 1``.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    num_tokens = values.shape[1]
    if num_tokens == 0:
        return torch.zeros_like(values), h
    with without_autocast(values.device):  # it would cut the memory's float32 short
        if num_tokens == 1:
            o, h = step(h, *(x[:, 0] for x in inputs))
            o = o[:, None]
        else:
            o, h = chunked(h, inputs, min(chunk_size, num_tokens))
    return o.to(values.dtype), h


def run_one_by_one(
    step: Step, h: Float[Tensor, "B H K F"], inputs: Inputs, values: Float[Tensor, "B T H V"]
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K F"]]:
    """All tokens by the step, one after another; output like the values."""
    outputs = [torch.zeros_like(values[:, :0])]
    for t in range(values.shape[1]):
        o, h = step(h, *(x[:, t] for x in inputs))
        outputs.append(o[:, None].to(values.dtype))
    return torch.cat(outputs, dim=1), h


def in_working_precision(
    state: Float[Tensor, "B H K F"] | None, shape: tuple[int, int, int, int], *inputs: Tensor
) -> tuple[Inputs, Float[Tensor, "B H K F"]]:
    """Inputs and memory in float32, in float64 if the first input is; zeros for no memory.

    Raises:
        ValueError: a state of another shape.
    """
    working = torch.promote_types(inputs[0].dtype, torch.float32)
    if state is None:
        state = inputs[0].new_zeros(shape, dtype=working)
    check_shape("[B, H, K, ...]", shape, state=state)
    return tuple(x.to(working) for x in inputs), state.to(working)
