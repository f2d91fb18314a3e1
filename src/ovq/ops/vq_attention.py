"""Softmax attention over keys that a static codebook quantizes, in linear time and constant memory.

Keys that share a code share a logit, so the past needs one mean of values and one count per code.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ovq.ops.decay import without_autocast
from ovq.ops.inputs import check_inputs
from ovq.ops.quantization import nearest_codes, quantized
from ovq.ops.vq_state import VQState, tail_length

# A logit that no other comes near to: its weight is exactly zero, and no sum with it is infinite.
NEVER = -1e9


def vq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    codes: Float[Tensor, "G S K"],
    state: VQState | None = None,
    *,
    block_size: int,
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
    quantization. Gradients go straight through the quantization to the keys of the two blocks, and
    to all values; the codes get none, being trained by moving averages. Training holds the means
    before each block, ``T / C`` times ``[S, K + V]`` numbers per row and key-value head.

    Args:
        q: queries ``[B, T, H, K]``, normally of unit norm.
        k: keys ``[B, T, G, K]``, not quantized; ``G`` divides ``H`` (grouped queries).
        v: values ``[B, T, G, V]``.
        beta: inverse temperatures ``[H]``.
        codes: the codebook of each key-value head, ``[G, S, K]``.
        state: what came before; ``None`` at the start. It is not changed.
        block_size: ``C >= 1``. It decides where gradients flow, and what is held in a state.
        assigned: the code of each key, ``[B, T, G]``; ``None`` for the nearest.

    Returns:
        The output ``[B, T, H, V]`` in the dtype of ``q``, and the state after the last token.

    Raises:
        ValueError: shapes that do not fit, ``block_size < 1``, or a state of another batch size,
            other heads, codes or blocks.

    Example:
        >>> q = k = F.normalize(torch.randn(1, 100, 2, 4), dim=-1)
        >>> codes = F.normalize(torch.randn(2, 16, 4), dim=-1)
        >>> o, state = vq_attention(q, k, k, torch.tensor([8.0, 8.0]), codes, block_size=8)
        >>> tuple(o.shape), state.counts.sum(-1).tolist()
        ((1, 100, 2, 4), [[88, 88]])

    Source: "Transformer-VQ" (arXiv 2309.16354), section 3.3; as there, all keys are quantized.
    """
    _check(q, k, v, beta, codes, block_size, assigned)
    _check_state(state, k, v, codes, block_size)
    with without_autocast(q.device):  # it would cut the means' float32 short
        k_hat, v_in, assigned = _working_inputs(k, v, codes, assigned)
        scaled = q.to(k_hat.dtype) * beta.to(k_hat.dtype)[:, None]
        codes = codes.detach().to(k_hat.dtype)
        line = _Line.of(k_hat, v_in, assigned, state, codes.shape[1], block_size)
        sums, counts = line.totals_before_blocks()
        means = sums / counts.clamp_min(1)[..., None]
        if state is not None and q.shape[1] == 1:
            o = _attend_one(scaled, line, codes, means[:, 0], counts[:, 0])
        else:
            o = _attend_in_blocks(scaled, line, codes, means, counts)
        after = line.state_after(sums, counts)
    return o.to(q.dtype), after


def naive_vq_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    codes: Float[Tensor, "G S K"],
    state: VQState | None = None,
    *,
    block_size: int,
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
    _check_state(state, k, v, codes, block_size)
    k_hat, v_in, assigned = _working_inputs(k, v, codes, assigned)
    scaled, codes = q.to(k_hat.dtype) * beta.to(k_hat.dtype)[:, None], codes.detach().to(k_hat)
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
                scaled[row, :, of_group], k_hat[row, :, g], v_in[row, :, g], assigned[row, :, g],
                codes[g], state.select_rows(torch.tensor([row])), after, row, g,
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
) -> Float[Tensor, "T J V"]:
    """The tokens of one row and key-value head; its part of the state is written to ``after``."""
    C, length = before.block_size, int(before.tail_length[0])
    means, counts = before.value_means[0, g], before.counts[0, g]
    keys, values, members = (
        list(tail[0, :length, g])
        for tail in (before.tail_keys, before.tail_values, before.tail_assigned)
    )
    outputs = [v.new_zeros(0, q.shape[1], v.shape[1])]
    for t in range(len(q)):
        keys, values, members = [*keys, k[t]], [*values, v[t]], [*members, assigned[t]]
        over_codes = q[t] @ codes.mT + counts.to(codes).log()  # [J, S]
        weights = torch.cat([over_codes, q[t] @ torch.stack(keys).mT], dim=-1).softmax(-1)
        outputs.append((weights @ torch.cat([means, torch.stack(values)]))[None])
        if len(keys) == 2 * C:  # the older block joins the means
            for m, value in zip(members[:C], values[:C], strict=True):
                joins = F.one_hot(m, len(counts))
                counts = counts + joins
                means = means + (joins.to(means) / counts.clamp_min(1))[:, None] * (value - means)
            keys, values, members = keys[C:], values[C:], members[C:]
    after.value_means[row, g] = means * (counts > 0)[:, None]  # an unused one is a constant
    after.counts[row, g] = counts
    tails = (after.tail_keys, keys), (after.tail_values, values), (after.tail_assigned, members)
    for buffer, tail in tails:
        buffer[row, :, g] = 0
        if tail:
            buffer[row, : len(tail), g] = torch.stack(tail)
    return torch.cat(outputs)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The tail of the state and the new tokens of each row, joined without a gap and cut in blocks.

    Rows may stand at different places of their block, but a tail begins with one: so all rows have
    their blocks at the same places of the line.

    Attributes:
        keys: ``[B, n, C, G, K]``; past the last token of a row there is no meaning.
        values: ``[B, n, C, G, V]``.
        assigned: ``[B, n, C, G]``.
        start: the state before.
        first: ``[B]``, the place of the first new token.
        num_new: ``T``.
    """

    keys: Float[Tensor, "B n C G K"]
    values: Float[Tensor, "B n C G V"]
    assigned: Int[Tensor, "B n C G"]
    start: VQState
    first: Int[Tensor, " B"]
    num_new: int

    @classmethod
    def of(
        cls,
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        assigned: Int[Tensor, "B T G"],
        state: VQState | None,
        num_codes: int,
        block_size: int,
    ) -> "_Line":
        (B, T, G, K), V = k.shape, v.shape[3]
        capacity = 0 if state is None else 2 * block_size - 1
        if state is None:
            state = VQState.empty(
                B, G, K, V,
                num_codes=num_codes, block_size=block_size, dtype=k.dtype, device=k.device,
            )  # fmt: skip
        num_blocks = max(1, -(-(capacity + T) // block_size))
        first = state.tail_length
        places = torch.arange(num_blocks * block_size, device=k.device)
        source = torch.where(places < first[:, None], places, capacity + places - first[:, None])
        fill = num_blocks * block_size  # whatever a row is short of

        def joined(tail: Tensor, new: Tensor) -> Tensor:
            pool = torch.cat([tail[:, :capacity].to(new.dtype), new], dim=1)
            pool = F.pad(pool, (0, 0) * (new.ndim - 2) + (0, fill))
            return _at(pool, source).unflatten(1, (num_blocks, block_size))

        return cls(
            keys=joined(state.tail_keys, k),
            values=joined(state.tail_values, v),
            assigned=joined(state.tail_assigned, assigned),
            start=state,
            first=first,
            num_new=T,
        )

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    def totals_before_blocks(
        self,
    ) -> tuple[Float[Tensor, "B n G S V"], Int[Tensor, "B n G S"]]:
        """Sums of values and counts per code: the state's, then with each block but the last."""
        values = self.values[:, :-1].transpose(2, 3)  # [B, n - 1, G, C, V]
        assigned = self.assigned[:, :-1].transpose(2, 3)
        counts, ones = self.start.counts[:, None], torch.ones_like(assigned)
        sums = self.start.value_means.to(values.dtype) * self.start.counts[..., None]
        of_blocks = values.new_zeros(*values.shape[:3], *sums.shape[2:]).scatter_add(
            3, assigned[..., None].expand_as(values), values
        )
        counts_of_blocks = ones.new_zeros(*ones.shape[:3], counts.shape[3]).scatter_add(
            3, assigned, ones
        )
        return (
            torch.cat([sums[:, None], of_blocks], dim=1).cumsum(1),
            torch.cat([counts, counts_of_blocks], dim=1).cumsum(1),
        )

    def state_after(
        self, sums: Float[Tensor, "B n G S V"], counts: Int[Tensor, "B n G S"]
    ) -> VQState:
        """What is left once the blocks before the previous one are in the means."""
        C, capacity = self.keys.shape[2], self.start.tail_keys.shape[1]
        held = self.first + self.num_new
        length = tail_length(held, C)
        num_absorbed = (held - length) // C  # blocks
        tail = torch.arange(capacity, device=held.device)
        is_token = tail < length[:, None]
        places = (held - length)[:, None] + tail.minimum(length[:, None] - 1).clamp_min(0)

        def of_tail(x: Tensor) -> Tensor:
            mask = is_token.view(*is_token.shape, *[1] * (x.ndim - 3))
            return torch.where(mask, _at(x.flatten(1, 2), places), 0)

        counts_after = _at(counts, num_absorbed[:, None])[:, 0]
        sums_after = _at(sums, num_absorbed[:, None])[:, 0]
        return VQState(
            value_means=sums_after / counts_after.clamp_min(1)[..., None],
            counts=counts_after,
            tail_keys=of_tail(self.keys),
            tail_values=of_tail(self.values),
            tail_assigned=of_tail(self.assigned),
            num_tokens=self.start.num_tokens + self.num_new,
        )


def _attend_in_blocks(
    q: Float[Tensor, "B T H K"],
    line: _Line,
    codes: Float[Tensor, "G S K"],
    means: Float[Tensor, "B n G S V"],
    counts: Int[Tensor, "B n G S"],
) -> Float[Tensor, "B T H V"]:
    """Every block of queries beside its block of keys, the one before, and the codes."""
    B, n, C = line.keys.shape[:3]
    places = torch.arange(n * C, device=q.device)
    new = (places - line.first[:, None]).clamp(0, max(0, q.shape[1] - 1))
    if q.shape[1] == 0:
        return means.new_zeros(B, 0, q.shape[2], means.shape[-1])
    queries = _at(q, new).unflatten(1, (n, C))

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
        with_block_before(line.keys).flatten(0, 1),
        with_block_before(line.values).flatten(0, 1),
        bias.expand(B, n, 2 * C).flatten(0, 1),
        codes,
        means[:, older].flatten(0, 1),
        counts[:, older].flatten(0, 1),
        visible=j <= i[:, None] + C,
    )
    o = o.unflatten(0, (B, n)).flatten(1, 2)
    return _at(o, line.first[:, None] + torch.arange(q.shape[1], device=q.device))


def _attend_one(
    q: Float[Tensor, "B 1 H K"],
    line: _Line,
    codes: Float[Tensor, "G S K"],
    means: Float[Tensor, "B G S V"],
    counts: Int[Tensor, "B G S"],
) -> Float[Tensor, "B 1 H V"]:
    """One new token beside the tail and the codes: decoding."""
    keys, values = line.keys.flatten(1, 2), line.values.flatten(1, 2)
    places = torch.arange(keys.shape[1], device=q.device)
    bias = torch.where(places <= line.first[:, None], 0.0, NEVER).to(q.dtype)
    return _joint_softmax(q, keys, values, bias, codes, means, counts, visible=None)


def _joint_softmax(
    q: Float[Tensor, "M C H K"],
    keys: Float[Tensor, "M W G K"],
    values: Float[Tensor, "M W G V"],
    bias: Float[Tensor, "M W"],
    codes: Float[Tensor, "G S K"],
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
    over_codes = torch.cat([codes.expand(M, *codes.shape), log_counts[..., None]], dim=-1)
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


def _at(x: Shaped[Tensor, "B P *F"], places: Int[Tensor, "B Q"]) -> Shaped[Tensor, "B Q *F"]:
    """The entries of each row at its own places."""
    index = places.view(*places.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _working_inputs(
    k: Tensor, v: Tensor, codes: Tensor, assigned: Tensor | None
) -> tuple[Float[Tensor, "B T G K"], Float[Tensor, "B T G V"], Int[Tensor, "B T G"]]:
    """Quantized keys and the values in the working dtype, and the keys' codes."""
    working = torch.promote_types(k.dtype, torch.float32)
    if assigned is None:
        assigned = nearest_codes(k, codes)
    return quantized(k.to(working), codes, assigned), v.to(working), assigned


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
