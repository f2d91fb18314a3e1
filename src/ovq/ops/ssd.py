"""State space duality: the selective state space of Mamba-2, in a form made of matrix products."""

from jaxtyping import Float
from torch import Tensor

from ovq.ops.chunk_scan import scan_chunks
from ovq.ops.decay import decay_between, in_chunks, out_of_chunks
from ovq.ops.inputs import check_floating, check_shape
from ovq.ops.recurrence import in_working_precision, run_in_chunks, run_one_by_one


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
    inputs, h = _prepared(x, dt, A, B, C, state)
    return run_in_chunks(_step, _chunked, h, inputs, x, chunk_size)


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
    inputs, h = _prepared(x, dt, A, B, C, state)
    return run_one_by_one(_step, h, inputs, x)


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
    h: Float[Tensor, "B H K V"], inputs: tuple[Tensor, ...], chunk_size: int
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """All chunks at once: what tokens read within a chunk, what they leave, what they find.

    Inputs as of :func:`_step`. Heads stand in their groups, ``[M, B, G, H / G, C, ...]``, so that
    products of ``B`` and ``C`` are taken once for each group.
    """
    num_tokens, groups = inputs[0].shape[1], (inputs[2].shape[2], -1)
    x, g, B, C = (in_chunks(z, chunk_size) for z in inputs)
    x, g = (z.unflatten(2, groups) for z in (x, g))
    B, C = (z.unsqueeze(3) for z in (B, C))
    decay, from_start = decay_between(g), g.cumsum(-1).exp()
    within = ((C @ B.mT) * decay) @ x
    left = B.mT @ (decay[..., -1, :, None] * x)  # [M, B, G, H / G, K, V]
    before, h = scan_chunks(from_start[..., -1], left, h.unflatten(1, groups))
    found = from_start[..., None] * (C @ before)
    return out_of_chunks((within + found).flatten(2, 3), num_tokens), h.flatten(1, 2)


def _prepared(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, ...], Float[Tensor, "B H K V"]]:
    """``dt x``, ``dt A``, ``B``, ``C`` and the state, checked, in the working precision."""
    check_floating(4, x=x, B=B, C=C)
    if not x.dtype == B.dtype == C.dtype:
        raise ValueError(f"x, B, C must share one dtype, got {x.dtype}, {B.dtype}, {C.dtype}")
    check_shape("[B, T, H]", x.shape[:3], dt=dt)
    check_shape("[H]", x.shape[2:3], A=A)
    if B.shape[:2] != x.shape[:2] or B.shape[2] == 0 or x.shape[2] % B.shape[2]:
        raise ValueError(
            f"B must have the batch and tokens of x {tuple(x.shape[:3])}, and groups that divide "
            f"its heads, got {tuple(B.shape)}"
        )
    check_shape("[B, T, G, K]", B.shape, C=C)
    shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3])
    (x, dt, A, B, C), h = in_working_precision(state, shape, x, dt, A, B, C)
    return (dt[..., None] * x, dt * A, B, C), h
