"""OVQ attention over all rows and heads at once, a chunk at a time, on any device.

The two halves stay apart: *assign* turns keys into slots and is the only part that is sequential
by nature, *read* turns queries, dictionary and slots into outputs. The backward keeps no dictionary
per chunk: it undoes the updates, from the last chunk to the first.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ovq.ops.ovq_attention.chunk_grid import Chunk, ChunkGrid
from ovq.ops.ovq_attention.dictionary import DictionaryConfig, on_grid, random_scores
from ovq.ops.ovq_attention.state import OVQState, Slots, working_dtype


class Gradients(NamedTuple):
    """What the backward gives back, each of the shape of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    key_means: Tensor
    value_means: Tensor
    tail_keys: Tensor
    tail_values: Tensor


def read_keys(keys: Float[Tensor, "*shape K"], config: DictionaryConfig) -> Tensor:
    """The key centroids as prediction sees them."""
    return at_unit_norm(keys) if config.centroid == "unit" else keys


def compared_keys(keys: Float[Tensor, "*shape K"], config: DictionaryConfig) -> Tensor:
    """The key centroids as scoring and assignment see them."""
    return keys if config.centroid == "mean" else at_unit_norm(keys)


def at_unit_norm(keys: Float[Tensor, "*shape K"]) -> Tensor:
    """``D / max(|D|, 1e-6)``."""
    return keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def read_logits(
    scaled: Float[Tensor, "r G J w K"],
    keys: Float[Tensor, "r G E K"],
    visible: Bool[Tensor, "r w E"],
    centroids: Float[Tensor, "r G n K"],
    counts: Int[Tensor, "r G n"],
) -> Float[Tensor, "r G Jw nE"]:
    """Logits over the dictionary, then the exact keys; ``log 0`` masks the slots not in use."""
    rows = scaled.flatten(2, 3)
    over_dictionary = rows @ centroids.mT + counts.to(rows.dtype).log()[:, :, None]
    over_exact = (rows @ keys.mT).unflatten(2, scaled.shape[2:4])
    over_exact = over_exact.masked_fill(~visible[:, None, None], -torch.inf).flatten(2, 3)
    return torch.cat([over_dictionary, over_exact], dim=-1)


def read(
    queries: Float[Tensor, "r G J w K"],
    beta: Float[Tensor, "G J"],
    keys: Float[Tensor, "r G E K"],
    values: Float[Tensor, "r G E V"],
    visible: Bool[Tensor, "r w E"],
    centroids: Float[Tensor, "r G n K"],
    value_means: Float[Tensor, "r G n V"],
    counts: Int[Tensor, "r G n"],
) -> tuple[Float[Tensor, "r G J w V"], Float[Tensor, "r G J w"]]:
    """One softmax over the dictionary and the exact keys; output and log-sum-exp."""
    logits = read_logits(queries * beta[:, :, None, None], keys, visible, centroids, counts)
    most = logits.amax(-1, keepdim=True)
    weights = (logits - most).exp()
    total = weights.sum(-1, keepdim=True)
    weights, lse = weights / total, most + total.log()
    n = counts.shape[-1]
    o = weights[..., :n] @ value_means + weights[..., n:] @ values
    group = queries.shape[2:4]
    return o.unflatten(2, group), lse[..., 0].unflatten(2, group)


def assign(
    keys: Float[Tensor, "f G C K"],
    centroids: Float[Tensor, "f G n K"],
    counts: Int[Tensor, "f G n"],
    num_active: Int[Tensor, " f"],
    num_new: Int[Tensor, " f"],
    random: Float[Tensor, "f G C"] | None,
    config: DictionaryConfig,
) -> Int[Tensor, "f G C"]:
    """The slot of every token of a chunk: a seed its own, every other key the nearest."""
    to_old = on_grid(keys @ centroids.mT).masked_fill(counts[:, :, None] == 0, -torch.inf)
    if not num_new.any():
        return to_old.argmax(-1)
    to_chunk = on_grid(keys @ compared_keys(keys, config).mT)
    score = keys.new_full(keys.shape[:3], -torch.inf)
    if random is not None:
        score = random
    elif counts.shape[-1]:
        score = to_old.amax(-1)
    if config.seeding == "novel":
        earlier = torch.ones(to_chunk.shape[-2:], device=keys.device).tril(-1).bool()
        to_earlier = on_grid(keys @ keys.mT).masked_fill(~earlier, -torch.inf).amax(-1)
        score = torch.maximum(score, to_earlier)
    rank = score.sort(stable=True).indices.argsort()  # ties: the earlier token first
    is_seed = rank < num_new[:, None, None]
    seed_slot = num_active[:, None, None] + is_seed.cumsum(-1) - 1
    to_new = to_chunk.masked_fill(~is_seed[:, :, None], -torch.inf)
    nearest = torch.cat([to_old, to_new], dim=-1).argmax(-1)  # ties: the lower slot
    n = counts.shape[-1]
    slots = torch.where(nearest < n, nearest, seed_slot.gather(-1, (nearest - n).clamp_min(0)))
    return torch.where(is_seed, seed_slot, slots)


def add_members(
    into: Tensor, slots: Int[Tensor, "f G C"], tokens: Shaped[Tensor, "f G C *D"]
) -> Tensor:
    """``into`` ``[f, G, n, ...]`` with each token added to its slot."""
    n = into.shape[2]
    head = torch.arange(slots.shape[0] * slots.shape[1], device=slots.device)
    index = (head.view(*slots.shape[:2], 1) * n + slots).flatten()
    return into.flatten(0, 2).index_add(0, index, tokens.flatten(0, 2)).view(into.shape)


def gather_slots(table: Float[Tensor, "f G n D"], slots: Int[Tensor, "f G C"]) -> Tensor:
    """The row of each token's slot, ``[f, G, C, D]``."""
    return table.gather(2, slots[..., None].expand(*slots.shape, table.shape[-1]))


def updated_means(
    means: Float[Tensor, "f G n D"],
    tokens: Float[Tensor, "f G C D"],
    slots: Int[Tensor, "f G C"],
    counts: Int[Tensor, "f G n"],
    members: Int[Tensor, "f G n"],
    config: DictionaryConfig,
) -> Float[Tensor, "f G n D"]:
    """The running means once the tokens have joined; slots without new members do not move."""
    sums = add_members(torch.zeros_like(means), slots, tokens)
    weight = 1 / (counts + members).clamp_min(1).to(means.dtype)
    if config.rate == "constant":
        of_old = config.step / members.clamp_min(1).to(means.dtype)
        weight = torch.where(counts > 0, of_old, weight)
    return means + weight[..., None] * (sums - members[..., None] * means)


def flat_list(tails: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Tails, tokens and the empty place of the grid's flat list, ``[P, G, D]``."""
    parts = [tokens.flatten(0, 1).to(dtype), tokens.new_zeros(1, *tokens.shape[2:], dtype=dtype)]
    return torch.cat(parts if tails is None else [tails.flatten(0, 1).to(dtype), *parts])


def by_group(tokens: Tensor, num_groups: int) -> Tensor:
    """``[r, w, H, ...]`` as ``[r, G, J, w, ...]``, the ``J`` query heads of each group together."""
    return tokens.unflatten(2, (num_groups, -1)).movedim(1, 3)


def from_groups(tokens: Tensor) -> Tensor:
    """The inverse of :func:`by_group`."""
    return tokens.movedim(3, 1).flatten(2, 3)


def pick(tensor: Tensor, rows: Int[Tensor, " r"]) -> Tensor:
    """The rows of a state's tensor; without a copy where they are all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def widest(counts: Int[Tensor, "r G N"]) -> int:
    """Slots in use in the row that uses most."""
    used = (counts > 0).flatten(0, 1).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    state: OVQState,
    grid: ChunkGrid,
    fed: Slots | None,
) -> tuple[Float[Tensor, "B T H V"], OVQState, Slots, Float[Tensor, "B T H"]]:
    """Outputs, the state after, the slots of all tokens, and the log-sum-exps of the softmax."""
    config, dtype, G = state.dictionary, working_dtype(q.dtype), k.shape[2]
    before, C = grid.num_tail_places, config.chunk_size
    flat_q = flat_list(None, q, dtype)
    flat_k, flat_v = (
        flat_list(tail, new, dtype)
        for tail, new in ((state.tail_keys, k), (state.tail_values, v))
    )  # fmt: skip
    flat_slots = flat_k.new_full(flat_k.shape[:2], -1, dtype=torch.int64)
    flat_fed = None if fed is None else flat_list(fed.tail, fed.tokens, torch.int64)
    flat_o = flat_q.new_zeros(*flat_q.shape[:2], v.shape[-1])
    flat_lse = flat_q.new_zeros(flat_q.shape[:2])
    beta = beta.to(dtype).unflatten(0, (G, -1))
    if not torch.is_grad_enabled() and bool((grid.num_full > 0).any()):
        state = state.map(torch.clone)  # ours, so that absorb may write into it
    for chunk in grid.chunks():
        n = int(pick(state.num_active, chunk.rows).max())
        key_means, value_means, counts = (
            pick(tensor, chunk.rows)[:, :, :n]
            for tensor in (state.key_means, state.value_means, state.counts)
        )
        keys, values = (flat[chunk.keys].movedim(2, 1) for flat in (flat_k, flat_v))
        queries = by_group(flat_q[chunk.queries - before], G)
        centroids = read_keys(key_means, config)
        o, lse = read(
            queries, beta, keys, values, chunk.visible, centroids, value_means, counts
        )  # fmt: skip
        flat_o[chunk.queries - before] = from_groups(o)
        flat_lse[chunk.queries - before] = from_groups(lse)
        if len(chunk.leaving):
            places = chunk.keys[chunk.leaving, :C]
            given = None if flat_fed is None else flat_fed[places].movedim(2, 1)
            tokens = (keys[chunk.leaving, :, :C], values[chunk.leaving, :, :C])
            state, slots = absorb(state, chunk.rows[chunk.leaving], *tokens, given)
            flat_slots[places] = slots.movedim(1, 2)
    state = with_tail(state, grid, flat_k, flat_v)
    joined = flat_slots[:before].view(-1, grid.tail_size, G), flat_slots[before:-1]
    o, lse, slots = (
        flat.unflatten(0, q.shape[:2]) for flat in (flat_o[:-1], flat_lse[:-1], joined[1])
    )
    return o.to(q.dtype), state, Slots(joined[0], slots), lse


def absorb(
    state: OVQState,
    rows: Int[Tensor, " f"],
    keys: Float[Tensor, "f G C K"],
    values: Float[Tensor, "f G C V"],
    fed: Int[Tensor, "f G C"] | None,
) -> tuple[OVQState, Int[Tensor, "f G C"]]:
    """The state once a chunk of the given rows is absorbed, and the slots its tokens joined.

    Without autograd the dictionary is written in place, so the state must be the caller's own.
    """
    config = state.dictionary
    n, absorbed = state.num_active[rows], state.num_absorbed[rows] + config.chunk_size
    grown = [
        config.num_active_after(*pair) for pair in zip(n.tolist(), absorbed.tolist(), strict=True)
    ]
    n_after = torch.tensor(grown, device=n.device)
    width = int(n.max())
    if fed is None:
        random = None
        if config.seeding == "random":
            offsets = torch.arange(-config.chunk_size, 0, device=n.device)
            random = random_scores(absorbed[:, None] + offsets, keys.shape[1], config.seed)
            random = random.movedim(2, 1).to(keys.dtype)
        centroids = compared_keys(state.key_means[rows, :, :width], config)
        counts = state.counts[rows, :, :width]
        with torch.no_grad():
            slots = assign(keys, centroids, counts, n, n_after - n, random, config)
    else:
        slots, n_after = fed, torch.maximum(n, fed.amax((1, 2)) + 1)
    width = int(n_after.max())
    counts = state.counts[rows, :, :width]
    members = add_members(torch.zeros_like(counts), slots, torch.ones_like(slots))
    moved = {
        name: updated_means(
            getattr(state, name)[rows, :, :width], tokens, slots, counts, members, config
        )
        for name, tokens in (("key_means", keys), ("value_means", values))
    }
    moved["counts"] = counts + members
    tensors = state.tensors()
    for name, part in moved.items():
        if torch.is_grad_enabled():
            tensors[name] = tensors[name].clone()
        tensors[name][rows, :, :width] = part
    tensors["num_active"] = state.num_active.index_copy(0, rows, n_after)
    tensors["num_absorbed"] = state.num_absorbed.index_copy(0, rows, absorbed)
    return OVQState(dictionary=config, **tensors), slots


def with_tail(state: OVQState, grid: ChunkGrid, flat_k: Tensor, flat_v: Tensor) -> OVQState:
    """The state with the tokens that are not absorbed at the call's end."""
    places = grid.tail_places()
    tensors = state.tensors() | {
        "tail_keys": flat_k[places],
        "tail_values": flat_v[places],
        "tail_length": (grid.length - grid.num_full).to(places.device),
    }
    return OVQState(dictionary=state.dictionary, **tensors)


def read_backward(
    grad_o: Float[Tensor, "r G J w V"],
    queries: Float[Tensor, "r G J w K"],
    beta: Float[Tensor, "G J"],
    keys: Float[Tensor, "r G E K"],
    values: Float[Tensor, "r G E V"],
    visible: Bool[Tensor, "r w E"],
    centroids: Float[Tensor, "r G n K"],
    value_means: Float[Tensor, "r G n V"],
    counts: Int[Tensor, "r G n"],
) -> tuple[Tensor, ...]:
    """Gradients of :func:`read` to queries, beta, keys, values, centroids and value means."""
    n = counts.shape[-1]
    scaled = queries * beta[:, :, None, None]
    logits = read_logits(scaled, keys, visible, centroids, counts)
    # Not from the saved log-sum-exp: where logits are large it is coarse, and centroids that are
    # recovered with rounding would leave weights that do not add up to 1.
    weights = logits.softmax(-1)
    rows, grad = scaled.flatten(2, 3), grad_o.flatten(2, 3)
    grad_weights = torch.cat([grad @ value_means.mT, grad @ values.mT], dim=-1)
    grad_mean = (weights * grad_weights).sum(-1, keepdim=True)
    grad_logits = weights * (grad_weights - grad_mean)
    grad_rows = grad_logits[..., :n] @ centroids + grad_logits[..., n:] @ keys
    grad_scaled = grad_rows.view_as(queries)
    return (
        grad_scaled * beta[:, :, None, None],
        (grad_scaled * queries).sum((0, 3, 4)),
        grad_logits[..., n:].mT @ rows,
        weights[..., n:].mT @ grad,
        grad_logits[..., :n].mT @ rows,
        weights[..., :n].mT @ grad,
    )


def read_keys_backward(
    grad: Float[Tensor, "*shape K"], keys: Float[Tensor, "*shape K"], config: DictionaryConfig
) -> Tensor:
    """The gradient of :func:`read_keys`."""
    if config.centroid != "unit":
        return grad
    norm = keys.norm(dim=-1, keepdim=True)
    along = (grad * keys).sum(-1, keepdim=True) / norm.clamp_min(1e-6).square()
    return (grad - torch.where(norm > 1e-6, along, 0) * keys) / norm.clamp_min(1e-6)


class _Dictionaries:
    """The dictionaries of all rows while the backward undoes them, as sums ``S = c D``.

    ``grad_keys`` and ``grad_values`` are the gradient by mean over count, ``A = dD / c``: that
    quotient does not change when a slot's mean absorbs further members, and it is the gradient of
    each member.
    """

    def __init__(self, state: OVQState, grad_keys: Tensor, grad_values: Tensor):
        share = 1 / state.counts.clamp_min(1)[..., None].to(grad_keys.dtype)
        self.counts = state.counts.clone()
        # In float64: what the undoing loses then is the rounding of the last means alone.
        self.key_sums = state.key_means.double() * state.counts[..., None]
        self.value_sums = state.value_means.double() * state.counts[..., None]
        self.grad_keys, self.grad_values = grad_keys * share, grad_values * share

    def undo(self, rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take the members of a chunk out again."""
        n = widest(self.counts[rows])
        counts = add_members(self.counts[rows, :, :n], slots, -torch.ones_like(slots))
        self.counts[rows, :, :n] = counts
        for sums, tokens in ((self.key_sums, keys), (self.value_sums, values)):
            left = add_members(sums[rows, :, :n], slots, -tokens.double())
            sums[rows, :, :n] = left.masked_fill(counts[..., None] == 0, 0)


def backward(
    grad_o: Float[Tensor, "B T H V"],
    grad_state: OVQState,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    tails: tuple[Tensor, Tensor],
    after: OVQState,
    slots: Slots,
    lse: Float[Tensor, "B T H"],
    grid: ChunkGrid,
) -> Gradients:
    """The gradients of :func:`forward`, in memory that does not grow with the number of chunks.

    Args:
        grad_state: a state that holds gradients where ``after`` holds numbers.
        tails: keys and values of the tokens that came in unabsorbed.
        after: the state that the forward returned.
        lse: of the forward; not read here.
    """
    config, dtype, G = after.dictionary, working_dtype(q.dtype), k.shape[2]
    before, C = grid.num_tail_places, config.chunk_size
    flat_q, flat_grad_o = (flat_list(None, x, dtype) for x in (q, grad_o))
    flat_k, flat_v = flat_list(tails[0], k, dtype), flat_list(tails[1], v, dtype)
    flat_slots = flat_list(slots.tail, slots.tokens, torch.int64)
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (flat_q, flat_k, flat_v))
    grouped = beta.to(dtype).unflatten(0, (G, -1))
    grad_beta = torch.zeros_like(grouped)
    past = _Dictionaries(after, grad_state.key_means, grad_state.value_means)
    for chunk in grid.chunks(reverse=True):
        keys, values = (flat[chunk.keys].movedim(2, 1) for flat in (flat_k, flat_v))
        if len(chunk.leaving):
            rows, places = chunk.rows[chunk.leaving], chunk.keys[chunk.leaving, :C]
            joined = flat_slots[places].movedim(2, 1)
            for table, grads in ((past.grad_keys, grad_k), (past.grad_values, grad_v)):
                # Their first gradient: no later chunk reads these tokens exactly.
                grads[places] = gather_slots(table[rows], joined).movedim(1, 2)
            past.undo(rows, joined, keys[chunk.leaving, :, :C], values[chunk.leaving, :, :C])
        _read_chunk_backward(
            chunk, before, past, config, flat_q, flat_grad_o, keys, values,
            grouped, grad_q, grad_k, grad_v, grad_beta,
        )  # fmt: skip
    places = grid.tail_places().flatten()
    grad_k.index_add_(0, places, grad_state.tail_keys.flatten(0, 1))
    grad_v.index_add_(0, places, grad_state.tail_values.flatten(0, 1))
    weight = past.counts[..., None].to(dtype)
    return Gradients(
        q=grad_q[:-1].view(q.shape).to(q.dtype),
        k=grad_k[before:-1].view(k.shape).to(k.dtype),
        v=grad_v[before:-1].view(v.shape).to(v.dtype),
        beta=grad_beta.flatten().to(beta.dtype),
        key_means=weight * past.grad_keys,
        value_means=weight * past.grad_values,
        tail_keys=grad_k[:before].view_as(tails[0]),
        tail_values=grad_v[:before].view_as(tails[1]),
    )


def _read_chunk_backward(
    chunk: Chunk,
    before: int,
    past: _Dictionaries,
    config: DictionaryConfig,
    flat_q: Tensor,
    flat_grad_o: Tensor,
    keys: Tensor,
    values: Tensor,
    beta: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    grad_beta: Tensor,
) -> None:
    """Add the gradients of one chunk's read, with ``past`` as it stood before the chunk."""
    counts = pick(past.counts, chunk.rows)
    n = widest(counts)
    counts, queries = counts[:, :, :n], chunk.queries - before
    divisor = counts.clamp_min(1)[..., None]
    share = 1 / divisor.to(keys.dtype)
    key_means, value_means = (
        (pick(sums, chunk.rows)[:, :, :n] / divisor).to(keys.dtype)
        for sums in (past.key_sums, past.value_sums)
    )
    G = keys.shape[1]
    grad_queries, of_beta, of_keys, of_values, of_centroids, of_value_means = read_backward(
        by_group(flat_grad_o[queries], G),
        by_group(flat_q[queries], G), beta, keys, values, chunk.visible,
        read_keys(key_means, config), value_means, counts,
    )  # fmt: skip
    grad_q[queries] = from_groups(grad_queries)
    grad_k[chunk.keys] += of_keys.movedim(1, 2)
    grad_v[chunk.keys] += of_values.movedim(1, 2)
    grad_beta += of_beta
    of_key_means = read_keys_backward(of_centroids, key_means, config)
    for table, grad in ((past.grad_keys, of_key_means), (past.grad_values, of_value_means)):
        table[chunk.rows, :, :n] += grad * share
