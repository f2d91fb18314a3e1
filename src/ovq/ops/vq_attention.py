"""Softmax attention over keys that a static codebook quantizes, in linear time and constant memory.

Keys that share a code share a logit, so the past needs one mean of values and one count per code.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ovq.ops.decay import without_autocast
from ovq.ops.inputs import check_inputs
from ovq.ops.quantization import nearest_codes, quantized
from ovq.ops.vq_dense import NEVER, attend_to_all, state_of_all
from ovq.ops.vq_line import Line, at
from ovq.ops.vq_state import VQState

STRAIGHT_THROUGH = ("keys", "scores")
# Numbers of keys and values before all blocks: with many more, most of a CPU's time goes into fresh
# memory.
HELD_AT_ONCE = 2**22
# From the first token on, all pairs of so many tokens are dealt with faster than codes by blocks.
SHORT = 256


def vq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    codes: Float[Tensor, "G S K"],
    state: VQState | None = None,
    *,
    block_size: int,
    straight_through: str = "keys",
    assigned: Int[Tensor, "B T G"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], VQState]:
    """Causal softmax attention to quantized keys, blocks in parallel.

    Blocks of ``C`` tokens are counted from the first token of the sequence. A token attends, in one
    softmax, to the quantized keys of its own block and the one before, and to the codes of all
    older tokens, whose values enter by their means:

        logits = [ beta q . c[k_j] for j <= i, present and previous block ] ++
                 [ beta q . c[m] + log n[m] for each code m of older tokens ]
        o      = softmax(logits) . [ v_j ... ; mean of the values with code m ... ]

    It is ``softmax(beta q . c[k_j])`` over *all* earlier tokens, without approximation beyond the
    quantization. Gradients reach all values; the codes get none, being trained by moving averages.
    What goes straight through the quantization to queries and keys is a choice, and changes no
    output:

    * ``"keys"``, as in Transformer-VQ: the gradient of a quantized key is the key's. Queries meet
      codes, older keys get nothing.
    * ``"scores"``: the gradient of ``q . c[k_j]`` is that of ``q . k_j``. Queries meet the keys
      themselves; with older tokens it is that of ``q`` and the mean of the keys with the code, and
      so reaches each of them. Keys that came with a state are met as their codes.

    Sequences without a state, of up to 256 tokens, are dealt with by all pairs of their tokens. Of
    others training holds the means before each block, ``T / C`` times ``[S, V]`` numbers per row
    and key-value head, and ``[S, 2K]`` more for ``"scores"``.

    Args:
        q: queries ``[B, T, H, K]``, normally of unit norm.
        k: keys ``[B, T, G, K]``, not quantized; ``G`` divides ``H`` (grouped queries).
        v: values ``[B, T, G, V]``.
        beta: inverse temperatures ``[H]``.
        codes: the codebook of each key-value head, ``[G, S, K]``.
        state: what came before; ``None`` at the start. It is not changed.
        block_size: ``C >= 1``. It decides where gradients flow, and what is held in a state.
        straight_through: ``"keys"`` or ``"scores"``.
        assigned: the code of each key, ``[B, T, G]``; ``None`` for the nearest.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the state after the last token.

    Raises:
        ValueError: shapes that do not fit, ``block_size < 1``, an unknown ``straight_through``, or
            a state of another batch size, other heads, codes or blocks.

    Example:
        >>> q = k = F.normalize(torch.randn(1, 100, 2, 4), dim=-1)
        >>> codes = F.normalize(torch.randn(2, 16, 4), dim=-1)
        >>> o, state = vq_attention(q, k, k, torch.tensor([8.0, 8.0]), codes, block_size=8)
        >>> tuple(o.shape), state.counts.sum(-1).tolist()
        ((1, 100, 2, 4), [[88, 88]])

    Source: "Transformer-VQ" (arXiv 2309.16354), section 3.3; as there, all keys are quantized.
    """
    _check(q, k, v, beta, codes, block_size, assigned)
    check_straight_through(straight_through)
    _check_state(state, k, v, codes, block_size)
    if state is None and q.shape[1] <= SHORT:
        with without_autocast(q.device):
            k_hat, k, v, assigned = _working_inputs(k, v, codes, assigned)
            o = attend_to_all(
                q.to(k), k_hat, k, v, beta.to(k), codes.detach().to(k), assigned,
                block_size=block_size, straight_through=straight_through,
            )  # fmt: skip
            after = state_of_all(
                k_hat, v, assigned, num_codes=codes.shape[1], block_size=block_size
            )
        return o.to(q.dtype), after
    rows = _rows_at_once(k, v, codes, block_size)
    if rows < q.shape[0]:
        return _in_parts(
            rows, q, k, v, beta, codes, state, assigned,
            block_size=block_size, straight_through=straight_through,
        )  # fmt: skip
    with without_autocast(q.device):  # it would cut the means' float32 short
        k_hat, k, v, assigned = _working_inputs(k, v, codes, assigned)
        q_in, codes, scale = q.to(k), codes.detach().to(k), beta.to(k)[:, None]
        line = Line.of(k_hat, k, v, assigned, state, codes.shape[1], block_size)
        counts = line.counts_before_blocks()
        sums = line.sums_before_blocks(line.values, line.start.value_means)
        means = sums / counts.clamp_min(1)[..., None]
        scored = q_in, line.keys, codes
        if straight_through == "scores" and torch.is_grad_enabled():
            scored = _straight_through(q_in, line, codes, counts)
        queries, keys, codes = scored
        queries = queries * scale
        if state is not None and q.shape[1] == 1:
            o = _attend_one(queries, keys, codes, line, means[:, 0], counts[:, 0])
        else:
            o = _attend_in_blocks(queries, keys, codes, line, means, counts)
        after = line.state_after(sums, counts)
    return o.to(q.dtype), after


def _rows_at_once(k: Tensor, v: Tensor, codes: Tensor, block_size: int) -> int:
    """Rows whose means before all blocks stay in memory that a CPU's allocator hands out again."""
    if k.device.type != "cpu" or torch.compiler.is_compiling():
        return k.shape[0]
    num_blocks, (G, S, K) = 1 + k.shape[1] // block_size, codes.shape
    return max(1, HELD_AT_ONCE // (num_blocks * G * S * (K + v.shape[3])))


def _in_parts(
    rows: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    codes: Tensor,
    state: VQState | None,
    assigned: Tensor | None,
    **options: Any,
) -> tuple[Float[Tensor, "B T H V"], VQState]:
    """The same, so many rows at a time."""
    found = []
    for part in torch.arange(q.shape[0], device=q.device).split(rows):
        of_part = slice(int(part[0]), int(part[-1]) + 1)
        before = None if state is None else state.select_rows(part)
        known = None if assigned is None else assigned[of_part]
        inputs = q[of_part], k[of_part], v[of_part], beta, codes, before
        found.append(vq_attention(*inputs, assigned=known, **options))
    outputs, states = zip(*found, strict=True)
    return torch.cat(outputs), VQState.concat(states)


def naive_vq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    codes: Float[Tensor, "G S K"],
    state: VQState | None = None,
    *,
    block_size: int,
    straight_through: str = "keys",
    assigned: Int[Tensor, "B T G"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], VQState]:
    """The same by its definition, one token at a time: the oracle.

    Raises:
        ValueError: as :func:`vq_attention`.

    Example:
        >>> q = k = v = torch.ones(1, 3, 1, 4)
        >>> o, _ = naive_vq_attention(q, k, v, torch.ones(1), torch.ones(1, 2, 4), block_size=1)
        >>> o.flatten().unique().tolist()  # all keys have one code, all values are one
        [1.0]
    """
    _check(q, k, v, beta, codes, block_size, assigned)
    check_straight_through(straight_through)
    _check_state(state, k, v, codes, block_size)
    k_hat, raw, v_in, assigned = _working_inputs(k, v, codes, assigned)
    q_in, scale, codes = q.to(raw), beta.to(raw)[:, None], codes.detach().to(raw)
    (B, T, H, _), G, V = q.shape, k.shape[2], v.shape[3]
    if state is None:
        state = VQState.empty(
            B, G, k.shape[3], V,
            num_codes=codes.shape[1], block_size=block_size, dtype=k.dtype, device=k.device,
        )  # fmt: skip
    o, after = v_in.new_zeros(B, T, H, V), state.map(torch.clone)
    for row in range(B):
        for g in range(G):
            of_group = slice(g * H // G, (g + 1) * H // G)
            o[row, :, of_group] = _recur(
                q_in[row, :, of_group], k_hat[row, :, g], v_in[row, :, g], assigned[row, :, g],
                codes[g], state.select_rows(torch.tensor([row])), after, row, g,
                scale=scale[of_group], met=raw[row, :, g] if straight_through == "scores" else None,
            )  # fmt: skip
    return o.to(q.dtype), replace(after, num_tokens=state.num_tokens + T)


def _recur(
    q: Float[Tensor, "T J K"],
    k: Float[Tensor, "T K"],
    v: Float[Tensor, "T V"],
    assigned: Int[Tensor, " T"],
    codes: Float[Tensor, "S K"],
    before: VQState,
    after: VQState,
    row: int,
    g: int,
    *,
    scale: Float[Tensor, "J 1"],
    met: Float[Tensor, "T K"] | None,
) -> Float[Tensor, "T J V"]:
    """The tokens of one row and key-value head; its part of the state is written to ``after``.

    Gradients of scores meet the keys ``met``, older ones by their means; or quantized keys if it is
    ``None``, older ones as codes.
    """
    C, length = before.block_size, int(before.tail_length[0])
    means, counts, met_means = before.value_means[0, g], before.counts[0, g], codes
    keys, values, members = (
        list(tail[0, :length, g])
        for tail in (before.tail_keys, before.tail_values, before.tail_assigned)
    )
    met_keys = list(keys)
    outputs = [v.new_zeros(0, q.shape[1], v.shape[1])]
    for t in range(len(q)):
        keys, values, members = [*keys, k[t]], [*values, v[t]], [*members, assigned[t]]
        met_keys = [*met_keys, k[t] if met is None else met[t]]
        over_codes = scale * _scores(q[t], codes, met_means) + counts.to(codes).log()  # [J, S]
        over_keys = scale * _scores(q[t], torch.stack(keys), torch.stack(met_keys))
        weights = torch.cat([over_codes, over_keys], dim=-1).softmax(-1)
        outputs.append((weights @ torch.cat([means, torch.stack(values)]))[None])
        if len(keys) == 2 * C:  # the older block joins the means
            for m, value, key in zip(members[:C], values[:C], met_keys[:C], strict=True):
                joins = F.one_hot(m, len(counts))
                counts = counts + joins
                share = (joins.to(means) / counts.clamp_min(1))[:, None]
                means = means + share * (value - means)
                if met is not None:
                    met_means = met_means + share * (key - met_means)
            keys, values, members, met_keys = keys[C:], values[C:], members[C:], met_keys[C:]
    after.value_means[row, g] = means * (counts > 0)[:, None]  # an unused one is a constant
    after.counts[row, g] = counts
    tails = (after.tail_keys, keys), (after.tail_values, values), (after.tail_assigned, members)
    for buffer, tail in tails:
        buffer[row, :, g] = 0
        if tail:
            buffer[row, : len(tail), g] = torch.stack(tail)
    return torch.cat(outputs)


def _scores(
    q: Float[Tensor, "J K"], rows: Float[Tensor, "M K"], met: Float[Tensor, "M K"]
) -> Float[Tensor, "J M"]:
    """``q . rows``, with the gradient of ``q . met``."""
    through = q @ met.mT
    return through + (q @ rows.mT - through).detach()


def _straight_through(
    q: Float[Tensor, "B T H K"],
    line: Line,
    codes: Float[Tensor, "G S K"],
    counts: Int[Tensor, "B n G S"],
) -> tuple[Float[Tensor, "B T H L"], Float[Tensor, "B n C G L"], Float[Tensor, "B n G S L"]]:
    """Queries, keys and codes of ``L = 2K``: the same scores, with the gradients of other keys.

    With ``x`` a key and ``c`` its code, ``q . c = q . x + q . (c - x)``, of which the first product
    alone has gradients; for a code, ``x`` is the mean of its keys before each block.
    """
    sums = line.sums_before_blocks(line.raw_keys, codes)
    key_means = sums / counts.clamp_min(1)[..., None]  # zero without members: of weight zero
    return (
        torch.cat([q, q.detach()], dim=-1),
        torch.cat([line.raw_keys, (line.keys - line.raw_keys).detach()], dim=-1),
        torch.cat([key_means, (codes - key_means).detach()], dim=-1),
    )


def _attend_in_blocks(
    q: Float[Tensor, "B T H K"],
    keys: Float[Tensor, "B n C G K"],
    codes: Float[Tensor, "... G S K"],
    line: Line,
    means: Float[Tensor, "B n G S V"],
    counts: Int[Tensor, "B n G S"],
) -> Float[Tensor, "B T H V"]:
    """Every block of queries beside its block of keys, the one before, and the codes."""
    B, n, C = keys.shape[:3]
    places = torch.arange(n * C, device=q.device)
    new = (places - line.first[:, None]).clamp(0, max(0, q.shape[1] - 1))
    if q.shape[1] == 0:
        return means.new_zeros(B, 0, q.shape[2], means.shape[-1])
    queries = at(q, new).unflatten(1, (n, C))

    def with_block_before(x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return torch.cat([before, x], dim=2)

    # Before block j stand the blocks up to j - 2.
    older = (torch.arange(n, device=q.device) - 1).clamp_min(0)
    bias = torch.zeros(n, 2 * C, dtype=q.dtype, device=q.device)
    bias[0, :C] = NEVER  # there is no block before the first
    i, j = (torch.arange(length, device=q.device) for length in (C, 2 * C))
    o = _joint_softmax(
        queries.flatten(0, 1),
        with_block_before(keys).flatten(0, 1),
        with_block_before(line.values).flatten(0, 1),
        bias.expand(B, n, 2 * C).flatten(0, 1),
        codes if codes.ndim == 3 else codes[:, older].flatten(0, 1),
        means[:, older].flatten(0, 1),
        counts[:, older].flatten(0, 1),
        visible=j <= i[:, None] + C,
    )
    o = o.unflatten(0, (B, n)).flatten(1, 2)
    return at(o, line.first[:, None] + torch.arange(q.shape[1], device=q.device))


def _attend_one(
    q: Float[Tensor, "B 1 H K"],
    keys: Float[Tensor, "B n C G K"],
    codes: Float[Tensor, "... G S K"],
    line: Line,
    means: Float[Tensor, "B G S V"],
    counts: Int[Tensor, "B G S"],
) -> Float[Tensor, "B 1 H V"]:
    """One new token beside the tail and the codes: decoding."""
    keys, values = keys.flatten(1, 2), line.values.flatten(1, 2)
    places = torch.arange(keys.shape[1], device=q.device)
    bias = torch.where(places <= line.first[:, None], 0.0, NEVER).to(q.dtype)
    codes = codes if codes.ndim == 3 else codes[:, 0]
    return _joint_softmax(q, keys, values, bias, codes, means, counts, visible=None)


def _joint_softmax(
    q: Float[Tensor, "M C H K"],
    keys: Float[Tensor, "M W G K"],
    values: Float[Tensor, "M W G V"],
    bias: Float[Tensor, "M W"],
    codes: Float[Tensor, "... G S K"],
    means: Float[Tensor, "M G S V"],
    counts: Int[Tensor, "M G S"],
    visible: Bool[Tensor, "C W"] | None,
) -> Float[Tensor, "M C H V"]:
    """Attention to keys and codes in one softmax, the bias of each as a further component.

    A mask of queries by keys and codes would be as large as the logits; this one is the same for
    all ``M``, and none where every query sees every key.
    """
    (M, C, H, K), G, V = q.shape, keys.shape[2], values.shape[3]
    width = max(K + 1, V)  # the fused kernels want one width
    log_counts = torch.where(counts > 0, counts.clamp_min(1).to(q.dtype).log(), NEVER)
    over_codes = torch.cat([codes.expand(*counts.shape, K), log_counts[..., None]], dim=-1)
    over_keys = torch.cat([keys, bias[..., None, None].expand(M, -1, G, 1)], dim=-1)
    all_keys = torch.cat([over_codes, over_keys.transpose(1, 2)], dim=2)  # [M, G, S + W, K + 1]
    all_values = torch.cat([means, values.transpose(1, 2)], dim=2)
    queries = F.pad(q, (0, 1), value=1.0).unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4)
    mask = None
    if visible is not None:
        mask = F.pad(visible, (counts.shape[2], 0), value=True).repeat(H // G, 1)
    o = F.scaled_dot_product_attention(
        F.pad(queries.flatten(2, 3), (0, width - K - 1)),  # heads of a group as further queries
        F.pad(all_keys, (0, width - K - 1)),
        F.pad(all_values, (0, width - V)),
        attn_mask=mask,
        scale=1.0,
    )
    return o[..., :V].unflatten(2, (H // G, C)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _working_inputs(
    k: Tensor, v: Tensor, codes: Tensor, assigned: Tensor | None
) -> tuple[
    Float[Tensor, "B T G K"],
    Float[Tensor, "B T G K"],
    Float[Tensor, "B T G V"],
    Int[Tensor, "B T G"],
]:
    """Quantized keys, keys and values in the working dtype, and the keys' codes."""
    working = torch.promote_types(k.dtype, torch.float32)
    if assigned is None:
        assigned = nearest_codes(k, codes)
    k = k.to(working)
    return quantized(k, codes, assigned), k, v.to(working), assigned


def check_straight_through(name: str) -> None:
    """Raise unless there is such a gradient.

    Raises:
        ValueError: an unknown name.
    """
    if name not in STRAIGHT_THROUGH:
        raise ValueError(f"straight_through must be one of {STRAIGHT_THROUGH}, got {name!r}")


def _check(q, k, v, beta, codes, block_size, assigned) -> None:
    check_inputs(q, k, v)
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if beta.shape != q.shape[2:3]:
        raise ValueError(f"beta must be [H] = [{q.shape[2]}], got {tuple(beta.shape)}")
    G, K = k.shape[2:]
    if codes.ndim != 3 or codes.shape[0] != G or codes.shape[2] != K or not codes.shape[1]:
        raise ValueError(f"codes must be [G, S, K] = [{G}, S, {K}], got {tuple(codes.shape)}")
    if assigned is not None and assigned.shape != k.shape[:3]:
        raise ValueError(
            f"assigned must be [B, T, G] = {tuple(k.shape[:3])}, got {tuple(assigned.shape)}"
        )


def _check_state(state: VQState | None, k, v, codes, block_size: int) -> None:
    if state is None:
        return
    if state.num_rows != k.shape[0]:
        raise ValueError(
            f"state must have one row a sequence, {k.shape[0]} here, got {state.num_rows}"
        )
    if state.block_size != block_size:
        raise ValueError(f"state must be of block_size {block_size}, got one of {state.block_size}")
    wanted = (k.shape[2], codes.shape[1], v.shape[3])
    if state.value_means.shape[1:] != wanted or state.tail_keys.shape[3] != k.shape[3]:
        raise ValueError(
            f"state must hold value means {wanted} and keys of {k.shape[3]}, got "
            f"{tuple(state.value_means.shape[1:])} and {state.tail_keys.shape[3]}"
        )
