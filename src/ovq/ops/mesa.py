"""The mesa recurrence: at every token, the ridge regression of all values so far on their keys."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ovq.ops.decay import decay_between, in_chunks, out_of_chunks
from ovq.ops.inputs import check_inputs, check_shape
from ovq.ops.recurrence import in_working_precision, run_in_chunks, run_one_by_one


def mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    lamb: Float[Tensor, "H K"],
    state: Float[Tensor, "B H K F"] | None = None,
    *,
    chunk_size: int = 32,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K F"]]:
    """The recurrence of :func:`naive_mesa`, a chunk of tokens at a time, solved exactly.

    It makes a matrix ``[K, K]`` for every token. Those of one chunk are held at a time, in training
    too: the backward makes them again.

    Args:
        q: queries ``[B, T, H, K]``.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, H, V]``.
        g: log decay ``[B, T, H]``, finite and not above 0.
        beta: weight of each token ``[B, T, H]``, not below 0.
        lamb: regularisation ``[H, K]``, above 0.
        state: the sums before the first token, ``[B, H, K, K + V]``; ``None`` for zeros. It is not
            changed.
        chunk_size: tokens in one chunk; it changes time and rounding alone.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the sums after the last token
        ``[B, H, K, K + V]`` in float32, in float64 for float64 inputs.

    Raises:
        ValueError: shapes that do not fit, ``q``, ``k``, ``v`` of different dtypes, or
            ``chunk_size < 1``.

    Example:
        >>> q = k = torch.nn.functional.normalize(torch.randn(1, 9, 2, 4), dim=-1)
        >>> v, g, beta = torch.randn(1, 9, 2, 6), -torch.rand(1, 9, 2), torch.rand(1, 9, 2)
        >>> o, state = mesa(q, k, v, g, beta, torch.ones(2, 4))
        >>> tuple(o.shape), tuple(state.shape)
        ((1, 9, 2, 6), (1, 2, 4, 10))

    Source: "MesaNet" (arXiv 2506.05233), section 3, whose conjugate gradients approximate what is
    solved here.
    """
    inputs, lamb, h = _prepared(q, k, v, g, beta, lamb, state)
    step, chunked = partial(_step, lamb=lamb), partial(_chunked, lamb=lamb)
    return run_in_chunks(step, chunked, h, inputs, v, chunk_size)


def naive_mesa(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    lamb: Float[Tensor, "H K"],
    state: Float[Tensor, "B H K F"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K F"]]:
    """The recurrence, one token after another; arguments as of :func:`mesa`.

    With sums ``P`` ``[K, K]`` and ``S`` ``[K, V]`` for each head, side by side in the state::

        P <- exp(g) P + beta k k^T
        S <- exp(g) S + beta k v^T
        o  = S^T (P + diag(lamb))^-1 q

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> o, state = naive_mesa(one, one, 8 * one, 0 * one[0], one[0], one[0, 0])
        >>> o.item(), state.flatten().tolist()
        (4.0, [1.0, 8.0])
    """
    inputs, lamb, h = _prepared(q, k, v, g, beta, lamb, state)
    return run_one_by_one(partial(_step, lamb=lamb), h, inputs, v)


def _step(
    h: Float[Tensor, "B H K F"],
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H"],
    beta: Float[Tensor, "B H"],
    *,
    lamb: Float[Tensor, "H K"],
) -> tuple[Float[Tensor, "B H V"], Float[Tensor, "B H K F"]]:
    """One token: decay, add, solve, read."""
    added = (beta[..., None] * k)[..., :, None] * torch.cat([k, v], dim=-1)[..., None, :]
    h = g.exp()[..., None, None] * h + added
    products, sums = h.split([k.shape[-1], v.shape[-1]], dim=-1)
    solved = torch.linalg.solve(products + lamb.diag_embed(), q)
    return (solved[..., None, :] @ sums)[..., 0, :], h


def _chunked(
    h: Float[Tensor, "B H K F"],
    inputs: tuple[Tensor, ...],
    chunk_size: int,
    *,
    lamb: Float[Tensor, "H K"],
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K F"]]:
    """The sums at the start of every chunk, and from them the outputs of its tokens."""
    num_tokens = inputs[0].shape[1]
    q, k, v, g, beta = (in_chunks(x, chunk_size) for x in inputs)
    decay, from_start = decay_between(g), g.cumsum(-1).exp()
    weighed, pairs = beta[..., None] * k, torch.cat([k, v], dim=-1)
    added = (decay[..., -1, :, None] * weighed).mT @ pairs
    whole, outputs = from_start[..., -1, None, None], []
    parts = zip(q, k, v, beta, decay, from_start, strict=True)
    for part, whole_m, added_m in zip(parts, whole, added, strict=True):
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_read_chunk, h, lamb, *part, use_reentrant=False))
        else:
            outputs.append(_read_chunk(h, lamb, *part))
        h = whole_m * h + added_m
    return out_of_chunks(torch.stack(outputs), num_tokens), h


def _read_chunk(
    h: Float[Tensor, "B H K F"],
    lamb: Float[Tensor, "H K"],
    q: Float[Tensor, "B H C K"],
    k: Float[Tensor, "B H C K"],
    v: Float[Tensor, "B H C V"],
    beta: Float[Tensor, "B H C"],
    decay: Float[Tensor, "B H C C"],
    from_start: Float[Tensor, "B H C"],
) -> Float[Tensor, "B H C V"]:
    """Outputs of a chunk's tokens, from the sums ``h`` before it."""
    before, sums = h.split([k.shape[-1], v.shape[-1]], dim=-1)
    own = ((beta[..., None] * k)[..., :, None] * k[..., None, :]).flatten(-2)
    products = (decay @ own).unflatten(-1, before.shape[-2:])  # [B, H, C, K, K]
    products = products + from_start[..., None, None] * before[:, :, None]
    solved = torch.linalg.solve(products + lamb.diag_embed()[:, None], q)
    within = ((solved @ k.mT) * decay) @ (beta[..., None] * v)
    return within + from_start[..., None] * (solved @ sums)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, ...], Float[Tensor, "H K"], Float[Tensor, "B H K F"]]:
    """Inputs, regularisation and sums, checked, in the working precision."""
    check_inputs(q, k, v)
    check_shape("[B, T, H, K]", q.shape, k=k)
    check_shape("[B, T, H]", q.shape[:3], g=g, beta=beta)
    check_shape("[H, K]", q.shape[2:], lamb=lamb)
    B, _, H, K = q.shape
    shape = (B, H, K, K + v.shape[3])
    (*inputs, lamb), h = in_working_precision(state, shape, q, k, v, g, beta, lamb)
    return tuple(inputs), lamb, h
