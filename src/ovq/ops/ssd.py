"""State space duality: the selective state space of Mamba-2, in a form made of matrix products."""

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.ops.decay import (
    check_floating,
    check_state,
    decay_between,
    in_chunks,
    out_of_chunks,
    without_autocast,
)


def ssd(
    x: Float[Tensor, "B T H V"],
    dt: Float[Tensor, "B T H"],
    A: Float[Tensor, " H"],
    B: Float[Tensor, "B T G K"],
    C: Float[Tensor, "B T G K"],
    state: Float[Tensor, "B H K V"] | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The recurrence of :func:`naive_ssd`, a chunk of tokens at a time.

    It is linear attention with queries ``C``, keys ``B``, values ``dt x`` and log decay ``dt A``.

    Args:
        x: inputs ``[B, T, H, V]``.
        dt: step sizes ``[B, T, H]``, not below 0.
        A: rate of each head ``[H]``, not above 0.
        B: input maps ``[B, T, G, K]``; ``G`` divides ``H``, and a group's heads share its maps.
        C: output maps ``[B, T, G, K]``.
        state: the state before the first token, ``[B, H, K, V]``; ``None`` for zeros. It is not
            changed.
        chunk_size: tokens in one chunk; it changes time and rounding alone.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``x``, and the state after the last token
        ``[B, H, K, V]`` in float32, in float64 for float64 inputs.

    Raises:
        ValueError: shapes that do not fit, ``x``, ``B``, ``C`` of different dtypes, or
            ``chunk_size < 1``.

    Example:
        >>> x, dt, A = torch.randn(1, 9, 4, 6), torch.rand(1, 9, 4), -torch.rand(4)
        >>> B = C = torch.randn(1, 9, 2, 3)
        >>> y, state = ssd(x, dt, A, B, C)
        >>> tuple(y.shape), tuple(state.shape)
        ((1, 9, 4, 6), (1, 4, 3, 6))

    Source: "Transformers are SSMs" (arXiv 2405.21060), section 6.
    """
    _check_inputs(x, dt, A, B, C, state)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    with without_autocast(x.device):  # it would cut the state's float32 short
        inputs, h = _in_working_precision(x, dt, A, B, C, state)
        if x.shape[1] == 0:
            return x.new_zeros(x.shape), h
        if x.shape[1] == 1:
            y, h = _step(h, *(z[:, 0] for z in inputs))
            return y[:, None].to(x.dtype), h
        y, h = _chunked(h, *inputs, chunk_size=min(chunk_size, x.shape[1]))
        return y.to(x.dtype), h


def naive_ssd(
    x: Float[Tensor, "B T H V"],
    dt: Float[Tensor, "B T H"],
    A: Float[Tensor, " H"],
    B: Float[Tensor, "B T G K"],
    C: Float[Tensor, "B T G K"],
    state: Float[Tensor, "B H K V"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The recurrence, one token after another; arguments as of :func:`ssd`.

    With a state ``h`` ``[K, V]`` for each head::

        h <- exp(dt A) h + dt B x^T
        y  = h^T C

    Example:
        >>> one, half = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 0.5)
        >>> y, state = naive_ssd(8 * one, half, torch.zeros(1), one, one)
        >>> y.item(), naive_ssd(8 * one, half, torch.zeros(1), one, one, state)[0].item()
        (4.0, 8.0)
    """
    _check_inputs(x, dt, A, B, C, state)
    inputs, h = _in_working_precision(x, dt, A, B, C, state)
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        y, h = _step(h, *(z[:, t] for z in inputs))
        outputs.append(y[:, None].to(x.dtype))
    return torch.cat(outputs, dim=1), h


def _step(
    h: Float[Tensor, "B H K V"],
    x: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H"],
    B: Float[Tensor, "B G K"],
    C: Float[Tensor, "B G K"],
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K V"]]:
    """One token: decay, write, read. ``x`` is scaled by ``dt``, and ``g`` is ``dt A``."""
    B, C = (z.repeat_interleave(x.shape[1] // z.shape[1], dim=1) for z in (B, C))
    h = g.exp()[..., None, None] * h + B[..., :, None] * x[..., None, :]
    return (C[..., None, :] @ h)[..., 0, :], h


def _chunked(
    h: Float[Tensor, "B H K V"],
    x: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    B: Float[Tensor, "B T G K"],
    C: Float[Tensor, "B T G K"],
    *,
    chunk_size: int,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """All chunks at once: what tokens read within a chunk, what they leave, what they find.

    Arguments as of :func:`_step`. Heads stand in their groups, ``[M, B, G, H / G, C, ...]``, so
    that products of ``B`` and ``C`` are taken once for each group.
    """
    num_tokens, groups = x.shape[1], (B.shape[2], -1)
    x, g = (in_chunks(z, chunk_size).unflatten(2, groups) for z in (x, g))
    B, C = (in_chunks(z, chunk_size).unsqueeze(3) for z in (B, C))
    decay, from_start = decay_between(g), g.cumsum(-1).exp()
    within = ((C @ B.mT) * decay) @ x
    left = B.mT @ (decay[..., -1, :, None] * x)  # [M, B, G, H / G, K, V]

    h, before = h.unflatten(1, groups), []
    for left_m, whole_m in zip(left, from_start[..., -1, None, None], strict=True):
        before.append(h)
        h = whole_m * h + left_m
    found = from_start[..., None] * (C @ torch.stack(before))
    return out_of_chunks((within + found).flatten(2, 3), num_tokens), h.flatten(1, 2)


def _in_working_precision(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, ...], Float[Tensor, "B H K V"]]:
    """``dt x``, ``dt A``, ``B``, ``C`` and the state in float32, in float64 for float64 inputs."""
    working = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], B.shape[3], x.shape[3], dtype=working)
    x, dt, A, B, C = (z.to(working) for z in (x, dt, A, B, C))
    return (dt[..., None] * x, dt * A, B, C), state.to(working)


def _check_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> None:
    check_floating(4, x=x, B=B, C=C)
    check_floating(3, dt=dt)
    check_floating(1, A=A)
    if not x.dtype == B.dtype == C.dtype:
        raise ValueError(f"x, B, C must share one dtype, got {x.dtype}, {B.dtype}, {C.dtype}")
    if dt.shape != x.shape[:3]:
        raise ValueError(
            f"dt must have the batch, tokens and heads of x {tuple(x.shape[:3])}, "
            f"got {tuple(dt.shape)}"
        )
    if A.shape[0] != x.shape[2]:
        raise ValueError(f"A must have one rate a head, {x.shape[2]} here, got {A.shape[0]}")
    if B.shape[:2] != x.shape[:2] or B.shape[2] == 0 or x.shape[2] % B.shape[2]:
        raise ValueError(
            f"B must have the batch and tokens of x {tuple(x.shape[:3])}, and groups that divide "
            f"its heads, got {tuple(B.shape)}"
        )
    if C.shape != B.shape:
        raise ValueError(f"C must have the shape of B {tuple(B.shape)}, got {tuple(C.shape)}")
    check_state(state, (x.shape[0], x.shape[2], B.shape[3], x.shape[3]))
