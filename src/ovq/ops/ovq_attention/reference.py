"""OVQ attention, one sequence, one key-value head and one chunk at a time: the oracle.

Every function below is one step of the definition. Speed is no concern here; everything faster
equals this file, in its outputs, its gradients and its state.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.dictionary import DictionaryConfig, on_grid, random_scores
from ovq.ops.ovq_attention.state import OVQState, Slots, working_dtype


@dataclass(frozen=True)
class HeadDictionary:
    """The active slots of one key-value head of one sequence."""

    keys: Float[Tensor, "n K"]
    values: Float[Tensor, "n V"]
    counts: Int[Tensor, " n"]


def at_unit_norm(keys: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
    """``D / max(|D|, 1e-6)``."""
    return keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def read_keys(keys: Float[Tensor, "n K"], config: DictionaryConfig) -> Float[Tensor, "n K"]:
    """The key centroids as prediction sees them."""
    return at_unit_norm(keys) if config.centroid == "unit" else keys


def compared_keys(keys: Float[Tensor, "n K"], config: DictionaryConfig) -> Float[Tensor, "n K"]:
    """The key centroids as scoring and assignment see them."""
    return keys if config.centroid == "mean" else at_unit_norm(keys)


def predict(
    queries: Float[Tensor, "J c K"],
    keys: Float[Tensor, "s K"],
    values: Float[Tensor, "s V"],
    beta: Float[Tensor, " J"],
    visible: Bool[Tensor, "c s"],
    head: HeadDictionary,
    config: DictionaryConfig,
) -> Float[Tensor, "J c V"]:
    """One softmax over the dictionary as it stood before the chunk and the chunk's own keys.

    ``logits = [beta q . D_k[m] + log c[m]] ++ [beta q . k_j for visible j]``
    """
    over_dictionary = torch.einsum("jck,nk->jcn", queries, read_keys(head.keys, config))
    over_chunk = torch.einsum("jck,sk->jcs", queries, keys)
    logits = torch.cat(
        [
            beta[:, None, None] * over_dictionary + head.counts.to(beta).log(),
            (beta[:, None, None] * over_chunk).masked_fill(~visible, -torch.inf),
        ],
        dim=-1,
    )
    return logits.softmax(-1) @ torch.cat([head.values, values])


def choose_seeds(
    keys: Float[Tensor, "C K"],
    head: HeadDictionary,
    num_new: int,
    config: DictionaryConfig,
    random: Float[Tensor, " C"],
) -> Int[Tensor, " new"]:
    """The places in the chunk, in order, of the ``num_new`` keys that open new slots."""
    score = torch.full_like(keys[:, 0], -torch.inf)
    if config.seeding == "random":
        score = random
    elif len(head.counts):
        score = on_grid(keys @ compared_keys(head.keys, config).mT).amax(-1)
    if config.seeding == "novel":
        earlier = torch.ones(len(keys), len(keys), device=keys.device).tril(-1).bool()
        to_earlier = on_grid(keys @ keys.mT).masked_fill(~earlier, -torch.inf).amax(-1)
        score = torch.maximum(score, to_earlier)
    return score.sort(stable=True).indices[:num_new].sort().values  # ties: the earlier token


def assign_to_centroids(
    keys: Float[Tensor, "C K"],
    head: HeadDictionary,
    seeds: Int[Tensor, " new"],
    config: DictionaryConfig,
) -> Int[Tensor, " C"]:
    """The slot of each token: a seed its own, every other key the nearest, old or new."""
    centroids = torch.cat([head.keys, keys[seeds]])
    slots = on_grid(keys @ compared_keys(centroids, config).mT).argmax(-1)  # ties: the lower slot
    slots[seeds] = torch.arange(len(head.counts), len(centroids), device=keys.device)
    return slots


def update(
    head: HeadDictionary,
    keys: Float[Tensor, "C K"],
    values: Float[Tensor, "C V"],
    slots: Int[Tensor, " C"],
    config: DictionaryConfig,
) -> HeadDictionary:
    """The dictionary once the tokens have joined their slots: running means, one step of EM."""
    n, num_new = len(head.counts), max(0, int(slots.max()) + 1 - len(head.counts))
    joined = slots == torch.arange(n + num_new, device=keys.device)[:, None]  # [n', C]
    members = joined.sum(-1)
    counts = torch.cat([head.counts, head.counts.new_zeros(num_new)])
    grown = counts + members
    weight = members.to(keys) / grown  # of the new members' mean; 1 in a new slot
    if config.rate == "constant":
        weight = torch.where(counts > 0, config.step * (members > 0).to(keys), 1.0)

    def moved(means: Tensor, tokens: Tensor) -> Tensor:
        before = torch.cat([means, means.new_zeros(num_new, means.shape[-1])])
        mean_of_members = joined.to(tokens) @ tokens / members.clamp_min(1)[:, None]
        return before + weight[:, None] * (mean_of_members - before)

    return HeadDictionary(moved(head.keys, keys), moved(head.values, values), grown)


def forward_head(
    q: Float[Tensor, "T J K"],
    k: Float[Tensor, "P K"],
    v: Float[Tensor, "P V"],
    beta: Float[Tensor, " J"],
    head: HeadDictionary,
    absorbed: int,
    config: DictionaryConfig,
    random: Float[Tensor, " P"],
    fed: Int[Tensor, " P"] | None,
) -> tuple[Float[Tensor, "T J V"], HeadDictionary, Int[Tensor, " P"]]:
    """All chunks of one head: ``k`` and ``v`` begin with the tail, ``q`` with the call's tokens."""
    C, W, P, tail = config.chunk_size, config.window_size, len(k), len(k) - len(q)
    outputs = [v.new_zeros(0, q.shape[1], v.shape[-1])]
    slots = torch.full_like(k[:, 0], -1, dtype=torch.int64)
    for start in range(0, P, C):
        stop, oldest = min(start + C, P), max(0, start - W)
        first = max(start, tail)
        queries = q[first - tail : max(first, stop) - tail].movedim(0, 1)
        places = torch.arange(oldest, stop, device=k.device)
        visible = places <= torch.arange(first, max(first, stop), device=k.device)[:, None]
        exact = (k[oldest:stop], v[oldest:stop])
        outputs.append(predict(queries, *exact, beta, visible, head, config).movedim(1, 0))
        if stop - start == C and start >= W:  # the oldest chunk leaves the window
            absorbed += C
            leaving = slice(start - W, start - W + C)
            keys, values = k[leaving], v[leaving]
            if fed is None:
                num_new = config.num_active_after(len(head.counts), absorbed) - len(head.counts)
                seeds = choose_seeds(keys, head, num_new, config, random[leaving])
                slots[leaving] = assign_to_centroids(keys, head, seeds, config)
            else:
                slots[leaving] = fed[leaving]
            head = update(head, keys, values, slots[leaving], config)
    return torch.cat(outputs), head, slots


def forward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    beta: Float[Tensor, " H"],
    state: OVQState,
    spans: list[tuple[int, int, int]],
    slots: Slots | None,
) -> tuple[Float[Tensor, "B T H V"], OVQState, Slots]:
    """OVQ attention by its definition; see :func:`ovq.ops.ovq_attention.api.ovq_attention`.

    Args:
        spans: for each row of the state, the batch row, start and stop of its tokens.
        slots: the slots of all tokens, to be used in place of the assignment.
    """
    config, G, J = state.dictionary, k.shape[2], q.shape[2] // k.shape[2]
    dtype = working_dtype(q.dtype)
    q, k, v, beta = (tensor.to(dtype) for tensor in (q, k, v, beta))
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    joined = Slots(
        *(torch.full_like(t[..., 0], -1, dtype=torch.int64) for t in (state.tail_keys, k))
    )
    after = state.map(torch.clone)
    for row, (batch, start, stop) in enumerate(spans):
        tail, absorbed, n = (
            int(tensor[row]) for tensor in (state.tail_length, state.num_absorbed, state.num_active)
        )
        positions = torch.arange(absorbed, absorbed + tail + stop - start, device=q.device)
        random = random_scores(positions, G, config.seed).to(dtype)
        num_full = config.num_absorbed_after(absorbed + len(positions)) - absorbed
        for g in range(G):
            of_group = slice(g * J, (g + 1) * J)
            k_all = torch.cat([state.tail_keys[row, :tail, g], k[batch, start:stop, g]])
            v_all = torch.cat([state.tail_values[row, :tail, g], v[batch, start:stop, g]])
            fed = None
            if slots is not None:
                fed = torch.cat([slots.tail[row, :tail, g], slots.tokens[batch, start:stop, g]])
            head = HeadDictionary(
                state.key_means[row, g, :n],
                state.value_means[row, g, :n],
                state.counts[row, g, :n],
            )
            o_group, head, slots_head = forward_head(
                q[batch, start:stop, of_group],
                k_all, v_all, beta[of_group], head, absorbed, config, random[:, g], fed,
            )  # fmt: skip
            o[batch, start:stop, of_group] = o_group
            joined.tail[row, :tail, g] = slots_head[:tail]
            joined.tokens[batch, start:stop, g] = slots_head[tail:]
            after.key_means[row, g, : len(head.counts)] = head.keys
            after.value_means[row, g, : len(head.counts)] = head.values
            after.counts[row, g, : len(head.counts)] = head.counts
            after.num_active[row] = len(head.counts)
            for buffer, tokens in ((after.tail_keys, k_all), (after.tail_values, v_all)):
                buffer[row, :, g] = 0
                buffer[row, : len(tokens) - num_full, g] = tokens[num_full:]
        after.num_absorbed[row] += num_full
        after.tail_length[row] = len(positions) - num_full
    return o, after, joined
