"""A forward and a backward over states made into one PyTorch operator.

The operator is opaque to ``torch.compile`` (``fullgraph=True`` takes it) and keeps for the backward
one slot and one log-sum-exp a token beside its inputs and its final state.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ovq.ops.ovq_attention.chunk_grid import ChunkGrid
from ovq.ops.ovq_attention.dictionary import Centroid, DictionaryConfig, Growth, Seeding
from ovq.ops.ovq_attention.state import OVQState, Slots, working_dtype


def _apart(outputs: tuple[Tensor, ...], taken: set[int]) -> Any:
    """The outputs, cloned where they share storage with one another or with an input."""
    apart = []
    for tensor in outputs:
        storage = tensor.untyped_storage().data_ptr()
        apart.append(tensor.clone() if storage in taken else tensor)
        taken.add(storage)
    return tuple(apart)


def make_custom_op(name: str, forward: Callable, backward: Callable) -> Callable:
    """The differentiable operator ``ovq::{name}``.

    Args:
        name: of the operator; ``ovq::{name}_backward`` is its gradient.
        forward: ``(q, k, v, beta, state, grid, fed) -> (o, state, slots, lse)``.
        backward: ``(grad_o, grad_state, q, k, v, beta, tails, after, slots, lse, grid)`` to the
            gradients of q, k, v, beta, key means, value means, tail keys and tail values.

    Returns:
        ``(q, k, v, beta, state, cu_seqlens, fed) -> (o, state, slots)``.
    """

    @torch.library.custom_op(f"ovq::{name}", mutates_args=())
    def operator(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
        key_means: Tensor, value_means: Tensor, counts: Tensor, num_active: Tensor,
        num_absorbed: Tensor, tail_keys: Tensor, tail_values: Tensor, tail_length: Tensor,
        fed_tail: Tensor | None, fed_tokens: Tensor | None, cu_seqlens: Tensor | None,
        num_centroids: int, chunk_size: int, growth: str, growth_length: int | None, seeding: str,
        seed: int, centroid: str, window_size: int,
    ) -> tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    ]:  # fmt: skip
        """Output, the eight tensors of the state, slots of tails and tokens, log-sum-exp."""
        dictionary = DictionaryConfig(
            num_centroids=num_centroids, chunk_size=chunk_size, growth=cast(Growth, growth),
            growth_length=growth_length, seeding=cast(Seeding, seeding), seed=seed,
            centroid=cast(Centroid, centroid), window_size=window_size,
        )  # fmt: skip
        state = OVQState(
            key_means=key_means, value_means=value_means, counts=counts, num_active=num_active,
            num_absorbed=num_absorbed, tail_keys=tail_keys, tail_values=tail_values,
            tail_length=tail_length, dictionary=dictionary,
        )  # fmt: skip
        fed = None if fed_tail is None or fed_tokens is None else Slots(fed_tail, fed_tokens)
        grid = ChunkGrid.of(q.shape[0], q.shape[1], tail_length, cu_seqlens, dictionary)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            o, after, slots, lse = forward(q, k, v, beta, state, grid, fed)
        taken = {t.untyped_storage().data_ptr() for t in state.tensors().values()}
        return _apart((o, *after.tensors().values(), *slots, lse), taken)

    @operator.register_fake
    def _(q, k, v, beta, *rest):
        state, tail_keys = rest[:8], rest[5]
        rows = q.new_empty(*q.shape[:3], v.shape[-1])
        slots = (
            tail_keys.new_empty(tail_keys.shape[:3], dtype=torch.int64),
            k.new_empty(k.shape[:3], dtype=torch.int64),
        )
        lse = q.new_empty(q.shape[:3], dtype=working_dtype(q.dtype))
        return (rows, *(torch.empty_like(tensor) for tensor in state), *slots, lse)

    @torch.library.custom_op(f"ovq::{name}_backward", mutates_args=())
    def operator_backward(
        grad_o: Tensor, grad_key_means: Tensor, grad_value_means: Tensor,
        grad_tail_keys: Tensor, grad_tail_values: Tensor,
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, tail_keys: Tensor, tail_values: Tensor,
        tail_length: Tensor, key_means: Tensor, value_means: Tensor, counts: Tensor,
        slots_tail: Tensor, slots_tokens: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
        num_centroids: int, chunk_size: int, centroid: str, window_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k, v, beta, key means, value means, tail keys and tail values."""
        dictionary = DictionaryConfig(
            num_centroids=num_centroids, chunk_size=chunk_size,
            centroid=cast(Centroid, centroid), window_size=window_size,
        )  # fmt: skip
        whole = {"counts": counts, "tail_length": tail_length}
        whole |= {"num_active": tail_length, "num_absorbed": tail_length}  # not read
        after = OVQState(
            key_means=key_means, value_means=value_means, tail_keys=tail_keys,
            tail_values=tail_values, dictionary=dictionary, **whole,
        )  # fmt: skip
        grad_state = OVQState(
            key_means=grad_key_means, value_means=grad_value_means, tail_keys=grad_tail_keys,
            tail_values=grad_tail_values, dictionary=dictionary, **whole,
        )  # fmt: skip
        grid = ChunkGrid.of(q.shape[0], q.shape[1], tail_length, cu_seqlens, dictionary)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            gradients = backward(
                grad_o, grad_state, q, k, v, beta, (tail_keys, tail_values), after,
                Slots(slots_tail, slots_tokens), lse, grid,
            )  # fmt: skip
        return _apart(tuple(gradients), set())

    @operator_backward.register_fake
    def _(*inputs):
        q, k, v, beta, tail_keys, tail_values = inputs[5:11]
        key_means, value_means = inputs[12:14]
        of = (q, k, v, beta, key_means, value_means, tail_keys, tail_values)
        return tuple(
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in of
        )

    def setup_context(ctx, inputs, output):
        q, k, v, beta = inputs[:4]
        tail_keys, tail_values, tail_length = inputs[9:12]
        key_means, value_means, counts = output[1:4]
        ctx.save_for_backward(
            q, k, v, beta, tail_keys, tail_values, tail_length,
            key_means, value_means, counts, *output[9:12], inputs[14],
        )  # fmt: skip
        ctx.options = inputs[15], inputs[16], inputs[21], inputs[22]
        ctx.mark_non_differentiable(*output[3:6], *output[8:12])

    def gradients(ctx, *grads):
        saved = ctx.saved_tensors
        like = (saved[7], saved[8], saved[4], saved[5])
        of_state = (grads[i] for i in (1, 2, 6, 7))
        of_state = [
            torch.zeros_like(t) if g is None else g for g, t in zip(of_state, like, strict=True)
        ]
        grad_o = grads[0]
        if grad_o is None:
            q, v = saved[0], saved[2]
            grad_o = q.new_zeros(*q.shape[:3], v.shape[-1])
        dq, dk, dv, dbeta, dkeys, dvalues, dtail_keys, dtail_values = operator_backward(
            grad_o, *of_state, *saved, *ctx.options
        )
        of_inputs = (dq, dk, dv, dbeta, dkeys, dvalues, None, None, None, dtail_keys, dtail_values)
        return (*of_inputs, *(None,) * 12)

    operator.register_autograd(gradients, setup_context=setup_context)

    def call(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: OVQState,
        cu_seqlens: Tensor | None, fed: Slots | None,
    ) -> tuple[Tensor, OVQState, Slots]:  # fmt: skip
        d = state.dictionary
        o, *tensors, tail, tokens, _ = operator(
            q, k, v, beta, *state.tensors().values(), *(fed or (None, None)), cu_seqlens,
            d.num_centroids, d.chunk_size, d.growth, d.growth_length, d.seeding, d.seed, d.centroid,
            d.window_size,
        )  # fmt: skip
        named = dict(zip(state.tensors(), tensors, strict=True))
        return o, OVQState(dictionary=d, **named), Slots(tail, tokens)

    return call
