"""The one public function of OVQ attention: it checks, chooses an implementation, and calls it."""

import logging
import math
from functools import cache
from itertools import pairwise
from numbers import Real
from reprlib import repr as short
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention import chunked, reference
from ovq.ops.ovq_attention.chunk_grid import ChunkGrid
from ovq.ops.ovq_attention.cpu import kernel
from ovq.ops.ovq_attention.custom_op import make_custom_op
from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.ovq_attention.state import (
    OVQState,
    Slots,
    broken_bound,
    broken_shape,
    working_dtype,
)

Implementation = Literal["auto", "reference", "torch", "cpu"]
IMPLEMENTATIONS = ("reference", "torch", "cpu")
INTEGERS = (torch.int32, torch.int64)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)
_torch_op = make_custom_op("chunked", chunked.forward, chunked.backward)
_cpu_op = make_custom_op("cpu", kernel.forward, kernel.backward)


def ovq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: float | Float[Tensor, " H"],
    state: OVQState | None = None,
    *,
    dictionary: DictionaryConfig,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    impl: str = "auto",
) -> tuple[Float[Tensor, "B T H V"], OVQState]:
    """Attend to a dictionary learned from the tokens so far, and exactly to the present chunk.

    Token ``i`` of a chunk of ``C`` tokens takes one softmax over the dictionary as it stood before
    the chunk and over the chunk's own keys up to itself::

        logits = [beta q_i . D_k[m] + log c[m]  for active m] ++ [beta q_i . k_j  for j <= i]
        o_i    = softmax(logits) . [D_v[m] ... ; v_j ...]

    A full chunk then joins the dictionary: the keys that are most novel open new slots, every other
    key joins the nearest slot, and ``D_k[m]``, ``D_v[m]`` are the means of the ``c[m]`` members.
    With ``dictionary.window_size``, the ``W`` tokens before the chunk are read exactly too, and a
    chunk joins the dictionary when it leaves that window.
    Cost is linear in ``T``; the state has constant size. Any split of a sequence into calls that
    carry the state gives the outputs of one call.

    Args:
        q: queries ``[B, T, H, K]``, normally of unit norm.
        k: keys ``[B, T, G, K]``, normally of unit norm; ``G`` divides ``H``.
        v: values ``[B, T, G, V]``.
        beta: inverse temperature, a number or one for each query head ``[H]``.
        state: what came before, from an earlier call; ``None`` at the start. Never changed.
        dictionary: number of slots, chunk size, and the variants of the learning rule.
        cu_seqlens: ``[S + 1]`` the ends of ``S`` sequences packed into one batch row, from 0 to
            ``T``; the state then has ``S`` rows.
        impl: ``reference`` (the definition), ``torch`` (chunked, any device), ``cpu`` (one C++
            kernel, once it is built), or ``auto``: ``cpu`` where it serves, else ``torch``.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the state after the last token, in
        float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes, devices, ``cu_seqlens`` or ``beta`` out of the rules, a state of
            another size or configuration, an unknown ``impl``.

    Example:
        >>> unit = torch.nn.functional.normalize
        >>> q, k, v = (unit(torch.randn(1, 100, 4, 32), dim=-1) for _ in range(3))
        >>> dictionary = DictionaryConfig(num_centroids=16, chunk_size=32)
        >>> o, state = ovq_attention(q, k, v, 8.0, dictionary=dictionary)
        >>> o.shape, state.num_tokens.tolist(), state.num_active.tolist()
        (torch.Size([1, 100, 4, 32]), [100], [13])

    Source: "Online Vector Quantized Attention" (arXiv 2602.03922), sections on prediction and
    online update; details its summary leaves open are this project's reconstruction.
    """
    o, state, _ = ovq_attention_with_slots(
        q, k, v, beta, state, dictionary=dictionary, cu_seqlens=cu_seqlens, impl=impl
    )
    return o, state


def ovq_attention_with_slots(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: float | Float[Tensor, " H"],
    state: OVQState | None = None,
    *,
    dictionary: DictionaryConfig,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    impl: str = "auto",
    slots: Slots | None = None,
) -> tuple[Float[Tensor, "B T H V"], OVQState, Slots]:
    """:func:`ovq_attention` that also returns, and on request accepts, the slot of every token.

    Args:
        slots: the slots that full chunks are to use in place of their own assignment, for comparing
            implementations where rounding would decide between near-equal centroids.

    Returns:
        Output, state, and the slots of all tokens, -1 where a token waits in the unfinished chunk.
    """
    _check_inputs(q, k, v, beta, dictionary, cu_seqlens)
    num_rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (num_rows, k.shape[2], k.shape[3], v.shape[3])
    if state is None:
        state = OVQState.empty(*shape, dictionary=dictionary, dtype=q.dtype, device=q.device)
    else:
        _check_state(state, shape, q, dictionary)
    if not isinstance(beta, Tensor):
        beta = torch.full((q.shape[2],), float(beta), dtype=working_dtype(q.dtype), device=q.device)
    impl = _choose(impl, q.dtype, q.device.type, dictionary.rate)
    if impl != "cpu" and not torch.compiler.is_compiling():
        _check_parts(state)  # the kernel looks at them itself, in less time
    inputs = (q, k, v, beta, state)
    if torch.is_autocast_enabled(q.device.type):  # it would cut the state's float32 short
        with torch.autocast(q.device.type, enabled=False):
            return _run(impl, *inputs, cu_seqlens, slots)
    return _run(impl, *inputs, cu_seqlens, slots)


def _run(
    impl: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: OVQState,
    cu_seqlens: Tensor | None, slots: Slots | None,
) -> tuple[Tensor, OVQState, Slots]:  # fmt: skip
    if impl == "reference":
        o, after, joined = reference.forward(q, k, v, beta, state, _spans(q, cu_seqlens), slots)
        return o.to(q.dtype), after, joined
    dictionary = state.dictionary
    carried = (state.key_means, state.value_means, state.tail_keys, state.tail_values)
    tracked = any(tensor.requires_grad for tensor in (q, k, v, beta, *carried))
    through_op = torch.compiler.is_compiling() or (tracked and torch.is_grad_enabled())
    if through_op and dictionary.rate == "mean":
        op = _cpu_op if impl == "cpu" else _torch_op
        return op(q, k, v, beta, state, cu_seqlens, slots)
    if impl == "cpu":
        return kernel.forward_call(q, k, v, beta, state, cu_seqlens, slots)[:3]
    # A constant rate has no backward by undoing: plain autograd goes through the chunks.
    grid = ChunkGrid.of(q.shape[0], q.shape[1], state.tail_length, cu_seqlens, dictionary)
    return chunked.forward(q, k, v, beta, state, grid, slots)[:3]


@torch.compiler.assume_constant_result
def _choose(impl: str, dtype: torch.dtype, device: str, rate: str) -> str:
    if impl == "auto":
        reason = kernel.why_not(dtype, device, rate)
        chosen = "cpu" if reason is None else "torch"
        _say_once(f"impl='auto' chose {chosen!r}" + (f": 'cpu' {reason}" if reason else ""))
        return chosen
    if impl == "triton":
        raise ValueError(f"impl 'triton' is planned, not here yet; there is {IMPLEMENTATIONS}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLEMENTATIONS}, got {impl!r}")
    reason = kernel.why_not(dtype, device, rate) if impl == "cpu" else None
    if reason is not None:
        raise ValueError(f"impl 'cpu' {reason}; impl 'torch' and 'reference' serve here")
    return impl


@cache
def _say_once(line: str) -> None:
    logger.info(line)


def _spans(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """For each row of the state, the batch row, start and stop of its tokens."""
    if cu_seqlens is None:
        return [(row, 0, q.shape[1]) for row in range(q.shape[0])]
    ends = cu_seqlens.tolist()
    return [(0, start, stop) for start, stop in pairwise(ends)]


def _check_inputs(q, k, v, beta, dictionary, cu_seqlens) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {short(tensor)}")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have 4 axes [B, T, heads, dim], got {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be of a floating dtype of {DTYPES}, got {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} must have the dtype and device of q, {q.dtype} on {q.device}, got "
                f"{tensor.dtype} on {tensor.device}"
            )
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must share B, T and K with q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must share B, T and G with k {tuple(k.shape)}, got {tuple(v.shape)}")
    if 0 in (*q.shape[2:], *v.shape[2:]):
        raise ValueError(
            f"heads and head dimensions must be at least 1, got q {tuple(q.shape)} and v "
            f"{tuple(v.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k must have a number of heads G that divides H = {q.shape[2]}, got G = {k.shape[2]}"
        )
    if not isinstance(dictionary, DictionaryConfig):
        raise ValueError(f"dictionary must be a DictionaryConfig, got {type(dictionary).__name__}")
    _check_beta(beta, q)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)


def _check_beta(beta: float | Tensor, q: Tensor) -> None:
    dtype = working_dtype(q.dtype)
    if not isinstance(beta, Tensor):
        if not isinstance(beta, Real) or isinstance(beta, bool):
            raise ValueError(f"beta must be a number or a tensor, got {short(beta)}")
        if not abs(beta) <= torch.finfo(dtype).max:
            raise ValueError(f"beta must be finite in {dtype}, got {beta}")
        return
    if beta.shape != (q.shape[2],) or not beta.is_floating_point() or beta.device != q.device:
        raise ValueError(
            f"beta must be a number or a floating tensor [H] = [{q.shape[2]}] on {q.device}, got "
            f"{tuple(beta.shape)} {beta.dtype} on {beta.device}"
        )
    # The sum is finite only if all are, and costs a step of decoding less than a look at each.
    if torch.compiler.is_compiling() or math.isfinite(beta.to(dtype).sum().item()):
        return
    if not beta.to(dtype).isfinite().all():
        raise ValueError(f"beta must be finite in {dtype}, got {beta.tolist()}")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens must be an integer tensor [S + 1], got {short(cu_seqlens)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in INTEGERS:
        raise ValueError(
            f"cu_seqlens must be an integer tensor [S + 1] with S >= 1, got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"q must have B = 1 with cu_seqlens (packed sequences), got B = {q.shape[0]}"
        )
    if torch.compiler.is_compiling():
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != q.shape[1] or sorted(ends) != ends:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {q.shape[1]} without falling, got {ends}"
        )


def _check_state(
    state: OVQState, shape: tuple[int, int, int, int], q: Tensor, dictionary: DictionaryConfig
) -> None:
    if not isinstance(state, OVQState):
        raise ValueError(f"state must be an OVQState or None, got {short(state)}")
    if state.dictionary != dictionary:
        raise ValueError(
            f"state must be made with the dictionary of this call, {dictionary}, got one made with "
            f"{state.dictionary}"
        )
    held = (*state.key_means.shape[:2], state.key_means.shape[3], state.value_means.shape[3])
    if held != shape:
        raise ValueError(
            f"state must have [rows, G, K, V] = {list(shape)} for these inputs, got {list(held)}"
        )
    dtype, device = working_dtype(q.dtype), q.device
    if state.key_means.dtype != dtype or state.key_means.device != device:
        raise ValueError(
            f"state must be in {dtype} on {device} for inputs in {q.dtype}, got "
            f"{state.key_means.dtype} on {state.key_means.device}"
        )


def _check_parts(state: OVQState) -> None:
    broken = broken_shape(state) or broken_bound(state)
    if broken is not None:
        rule, found = broken
        raise ValueError(f"state must have {rule}, got {found}")
