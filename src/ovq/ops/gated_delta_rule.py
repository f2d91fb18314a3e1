"""The gated delta rule: a memory that decays and, of what is new, writes what it cannot recall."""

import torch
from jaxtyping import Float
from torch import Tensor

from ovq.ops.chunk_scan import scan_corrected_chunks
from ovq.ops.decay import decay_between, in_chunks, out_of_chunks
from ovq.ops.inputs import check_inputs, check_shape
from ovq.ops.recurrence import in_working_precision, run_in_chunks, run_one_by_one


def gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H K V"] | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The recurrence of :func:`naive_gated_delta_rule`, a chunk of tokens at a time.

    Args:
        q: queries ``[B, T, H, K]``.
        k: keys ``[B, T, H, K]``, of norm at most 1 for a stable recurrence.
        v: values ``[B, T, H, V]``.
        g: log decay ``[B, T, H]``, finite and not above 0.
        beta: writing strength ``[B, T, H]``, usually in (0, 1).
        state: the memory before the first token, ``[B, H, K, V]``; ``None`` for zeros. It is not
            changed.
        chunk_size: tokens in one chunk; it changes time and rounding alone.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the memory after the last token
        ``[B, H, K, V]`` in float32, in float64 for float64 inputs.

    Raises:
        ValueError: shapes that do not fit, ``q``, ``k``, ``v`` of different dtypes, or
            ``chunk_size < 1``.

    Example:
        >>> q = k = torch.nn.functional.normalize(torch.randn(1, 9, 2, 4), dim=-1)
        >>> v, g, beta = torch.randn(1, 9, 2, 6), -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
        >>> o, state = gated_delta_rule(q, k, v, g, beta)
        >>> tuple(o.shape), tuple(state.shape)
        ((1, 9, 2, 6), (1, 2, 4, 6))

    Source: "Gated Delta Networks" (arXiv 2412.06464), section 3.3; the chunk form is that of
    "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484).
    """
    inputs, h = _prepared(q, k, v, g, beta, state)
    return run_in_chunks(_step, _chunked, h, inputs, v, chunk_size)


def naive_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H K V"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """The recurrence, one token after another; arguments as of :func:`gated_delta_rule`.

    With a memory ``h`` ``[K, V]`` for each head::

        h <- exp(g) h
        h <- h + k u^T    where u = beta (v - h^T k)
        o  = K^-1/2 h^T q

    Example:
        >>> one, half = torch.ones(1, 1, 1), torch.full((1, 1, 1), 0.5)
        >>> key, value = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 8.0)
        >>> o, state = naive_gated_delta_rule(key, key, value, 0 * one, half)
        >>> o.item(), naive_gated_delta_rule(key, key, value, 0 * one, half, state)[0].item()
        (4.0, 6.0)
    """
    inputs, h = _prepared(q, k, v, g, beta, state)
    return run_one_by_one(_step, h, inputs, v)


def _step(
    h: Float[Tensor, "B H K V"],
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H"],
    beta: Float[Tensor, "B H"],
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K V"]]:
    """One token: decay, correct, read."""
    h = g.exp()[..., None, None] * h
    u = beta[..., None] * (v - (k[..., None, :] @ h)[..., 0, :])
    h = h + k[..., :, None] * u[..., None, :]
    return (q[..., None, :] @ h)[..., 0, :] * k.shape[-1] ** -0.5, h


def _chunked(
    h: Float[Tensor, "B H K V"], inputs: tuple[Tensor, ...], chunk_size: int
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """All chunks at once, but for the memory between them.

    With ``h`` the memory before a chunk and ``D_ij`` the decay from token ``j`` to ``i``, what the
    tokens write solves a triangular system, since each corrects what those before it wrote::

        u_i + beta_i sum_(j < i) D_ij (k_i . k_j) u_j = beta_i (v_i - D_i h^T k_i)

    so ``u = u_0 - W h``, where neither ``u_0`` nor ``W`` depends on ``h``.
    """
    num_tokens = inputs[0].shape[1]
    q, k, v, g, beta = (in_chunks(x, chunk_size) for x in inputs)
    decay, from_start = decay_between(g), g.cumsum(-1).exp()
    k_beta = beta[..., None] * k
    system = (k_beta @ k.mT) * decay  # the solver takes what lies under its diagonal
    sides = torch.cat([beta[..., None] * v, -from_start[..., None] * k_beta], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, recalled = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # u_0, -W

    kept = (decay[..., -1, :, None] * k).mT
    before, u, h = scan_corrected_chunks(from_start[..., -1], kept, written, recalled, h)
    q = k.shape[-1] ** -0.5 * q
    o = (from_start[..., None] * q) @ before + ((q @ k.mT) * decay) @ u
    return out_of_chunks(o, num_tokens), h


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, ...], Float[Tensor, "B H K V"]]:
    """Inputs and memory, checked, in the working precision."""
    check_inputs(q, k, v)
    check_shape("[B, T, H, K]", q.shape, k=k)
    check_shape("[B, T, H]", q.shape[:3], g=g, beta=beta)
    B, _, H, K = q.shape
    return in_working_precision(state, (B, H, K, v.shape[3]), q, k, v, g, beta)
