"""What a state tells of its dictionary, what quantization loses, and where a token reads.

These are figures to look at: no gradient passes through them, and no implementation needs them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.chunked import by_group, from_groups, read_keys, read_logits
from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.ovq_attention.state import OVQState


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Figures of a state, one for each row, and for each key-value head where heads differ.

    Attributes:
        num_tokens: ``[R]`` int64, tokens seen, absorbed or not yet.
        num_active: ``[R]`` int64, active slots.
        perplexity: ``[R, G]`` float64, ``exp`` of the entropy of ``c / sum c``: so many slots of
            equal count would be as spread; 0 before the first chunk is full.
        slot_ages: ``[R, N]`` int64, tokens seen since the update that opened each slot, by the
            growth schedule; -1 in slots that are not active or whose age is not known.
        unit_key_error: ``[R, G]`` float64, see :func:`error_of_unit_keys`.
    """

    num_tokens: Int[Tensor, " R"]
    num_active: Int[Tensor, " R"]
    perplexity: Float[Tensor, "R G"]
    slot_ages: Int[Tensor, "R N"]
    unit_key_error: Float[Tensor, "R G"]


@dataclass(frozen=True, kw_only=True)
class QuantizationError:
    """What is lost when each absorbed token is replaced by the centroid of its slot.

    All are nan for a row without absorbed tokens, and 0 where there was nothing to lose.

    Attributes:
        keys: ``[R, G]`` float64, ``||k - D_k[slot]||_F / ||k||_F``.
        values: ``[R, G]`` float64, the same of the values.
        keys_of_variance: ``[R, G]`` float64, the squared error as a fraction of what one centroid
            for all tokens would leave, ``||k - D_k[slot]||_F^2 / ||k - mean k||_F^2``.
        values_of_variance: ``[R, G]`` float64, the same of the values.
    """

    keys: Float[Tensor, "R G"]
    values: Float[Tensor, "R G"]
    keys_of_variance: Float[Tensor, "R G"]
    values_of_variance: Float[Tensor, "R G"]


class ReadWeights(NamedTuple):
    """The softmax of :func:`read_weights`; the weights of a token add up to 1.

    Attributes:
        dictionary: ``[B, T, H, N]``, on the slots, 0 where not active.
        exact: ``[B, T, H, L + T]``, on the places of the state's tail, 0 beyond its tokens, and on
            the tokens of the chunk, 0 at later ones.
    """

    dictionary: Float[Tensor, "B T H N"]
    exact: Float[Tensor, "B T H E"]


@torch.no_grad()
def diagnose(state: OVQState) -> Diagnostics:
    """Active slots, how evenly they are used, how old they are, and the error of unit keys.

    Slots open in order, and how many are active depends on the number of absorbed tokens alone. So
    the update that opened a slot is known from ``state.dictionary``; the slot's first member is one
    of the ``C`` tokens that were absorbed with it. This does not hold for slots that were fed in
    place of the assignment: where the number of active slots is not the schedule's, the row's ages
    are -1; where fed slots happen to give the same number, the ages are still the schedule's.

    Args:
        state: of any number of rows.

    Returns:
        The figures, on the device of the state.

    Example:
        >>> unit = torch.nn.functional.normalize
        >>> q, k, v = (unit(torch.randn(1, 100, 2, 8), dim=-1) for _ in range(3))
        >>> dictionary = DictionaryConfig(num_centroids=4, chunk_size=32)
        >>> _, state = ovq_attention(q, k, v, 8.0, dictionary=dictionary)
        >>> found = diagnose(state)
        >>> found.num_active.tolist(), found.slot_ages.tolist()
        ([3], [[68, 68, 68, -1]])
        >>> bool((found.perplexity <= 3).all())
        True
    """
    return Diagnostics(
        num_tokens=state.num_tokens,
        num_active=state.num_active,
        perplexity=_perplexity(state.counts),
        slot_ages=_slot_ages(state),
        unit_key_error=error_of_unit_keys(state),
    )


def _perplexity(counts: Int[Tensor, "R G N"]) -> Float[Tensor, "R G"]:
    total = counts.sum(-1)
    share = counts.double() / total.clamp_min(1)[..., None]
    return torch.special.entr(share).sum(-1).exp() * (total > 0)


def num_active_by_chunk(dictionary: DictionaryConfig, num_tokens: int) -> Int[Tensor, " chunks"]:
    """The growth schedule: active slots after each full chunk of a sequence of ``num_tokens``.

    Returns:
        ``[num_tokens // C]`` int64, on the CPU.

    Raises:
        ValueError: a negative number of tokens.

    >>> num_active_by_chunk(DictionaryConfig(num_centroids=100, chunk_size=50), 249).tolist()
    [33, 50, 60, 66]
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
    C, active = dictionary.chunk_size, [0]
    for seen in range(C, num_tokens + 1, C):
        absorbed = dictionary.num_absorbed_after(seen)
        active.append(dictionary.num_active_after(active[-1], absorbed) if absorbed else 0)
    return torch.tensor(active[1:], dtype=torch.int64)


def _length_of_growth(config: DictionaryConfig) -> int:
    """Tokens after which no slot opens, however long the stream."""
    N, C = config.num_centroids, config.chunk_size
    saturated = {"saturating": N * N, "linear": config.growth_length or 1, "immediate": N}
    # The schedule stands still from there on; the slots, at most C a chunk, catch up in N tokens.
    return saturated[config.growth] + N + 2 * C + config.window_size


def _slot_ages(state: OVQState) -> Int[Tensor, "R N"]:
    """Tokens since the update that opened each slot, -1 where there is none or it is unknown."""
    config, device = state.dictionary, state.counts.device
    most = int(state.num_tokens.max()) if state.num_rows else 0
    schedule = num_active_by_chunk(config, min(most, _length_of_growth(config)))
    slots = torch.arange(config.num_centroids)
    # The first chunk after which more than m slots are active opened slot m.
    opened = (torch.searchsorted(schedule, slots, right=True) + 1) * config.chunk_size
    num_full = (state.num_tokens.cpu() // config.chunk_size).clamp_max(len(schedule))[:, None]
    scheduled = torch.cat([torch.zeros(1, dtype=torch.int64), schedule])[num_full]  # [R, 1]
    num_active = state.num_active[:, None]
    known = (slots.to(device) < num_active) & (scheduled.to(device) == num_active)
    ages = state.num_tokens[:, None] - opened.to(device)
    return torch.where(known, ages, -1)


@torch.no_grad()
def error_of_unit_keys(state: OVQState) -> Float[Tensor, "R G"]:
    """Mean squared error of the absorbed keys, if each of them had unit norm, from the state alone.

    ``mean |k - D_k[slot]|^2 = 1 - sum_m c[m] |D_k[m]|^2 / sum_m c[m]`` because a slot's centroid is
    the mean of its members. The keys are gone, so the assumption that they had unit norm cannot be
    checked: with keys of other norms the figure means nothing.

    Returns:
        ``[R, G]`` float64, within [0, 1] up to rounding; nan before the first chunk is full, and
        with a constant rate, where centroids are no means.

    Example:
        >>> k = torch.nn.functional.normalize(torch.randn(1, 64, 1, 8), dim=-1)
        >>> dictionary = DictionaryConfig(num_centroids=64, chunk_size=8, growth="immediate")
        >>> _, state = ovq_attention(k, k, k, 8.0, dictionary=dictionary)
        >>> round(abs(error_of_unit_keys(state).item()), 5)  # every key has a slot of its own
        0.0
    """
    squares = state.counts * state.key_means.double().square().sum(-1)
    total = state.counts.sum(-1)
    error = 1 - squares.sum(-1) / total.clamp_min(1)
    known = (total > 0) & (state.dictionary.rate == "mean")
    return error.masked_fill(~known, torch.nan)


@torch.no_grad()
def quantization_error(
    state: OVQState,
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    slots: Int[Tensor, "B T G"],
    *,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
) -> QuantizationError:
    """The error of replacing keys and values by the centroids of their slots, as they are now.

    The centroids are ``state.key_means`` and ``state.value_means``, not scaled with
    ``centroid="unit"``. The error is over the tokens given: it is that of the whole dictionary only
    if all tokens since the start of the sequence are there.

    Args:
        state: after the tokens.
        k: keys ``[B, T, G, K]``.
        v: values ``[B, T, G, V]``.
        slots: ``[B, T, G]`` the slot that each token joined, -1 for those not absorbed, which do
            not count: ``tokens`` of the :class:`~ovq.ops.ovq_attention.state.Slots` of a call. A
            token that waited at the end of one call has its slot in ``tail`` of the next.
        cu_seqlens: ``[S + 1]`` as in the call, if the sequences are packed.

    Raises:
        ValueError: sizes that do not fit the state, or a slot outside ``[-1, N)``.

    Example:
        >>> from ovq.ops.ovq_attention.api import ovq_attention_with_slots
        >>> k = torch.nn.functional.normalize(torch.randn(1, 64, 2, 8), dim=-1)
        >>> dictionary = DictionaryConfig(num_centroids=16, chunk_size=8)
        >>> _, state, slots = ovq_attention_with_slots(k, k, k, 8.0, dictionary=dictionary)
        >>> error = quantization_error(state, k, k, slots.tokens)
        >>> torch.allclose(error.keys.square(), error_of_unit_keys(state), atol=1e-5)
        True
    """
    _check_tokens(state, k, v, slots, cu_seqlens)
    rows = _row_of_tokens(k, cu_seqlens)
    keys, keys_of_variance = _errors(k, state.key_means, slots, rows)
    values, values_of_variance = _errors(v, state.value_means, slots, rows)
    return QuantizationError(
        keys=keys,
        values=values,
        keys_of_variance=keys_of_variance,
        values_of_variance=values_of_variance,
    )


def _row_of_tokens(k: Tensor, cu_seqlens: Tensor | None) -> Int[Tensor, "B T"]:
    if cu_seqlens is None:
        return torch.arange(k.shape[0], device=k.device)[:, None].expand(k.shape[:2])
    lengths = cu_seqlens.diff().to(k.device)
    return torch.arange(len(lengths), device=k.device).repeat_interleave(lengths)[None]


def _errors(
    x: Float[Tensor, "B T G D"],
    means: Float[Tensor, "R G N D"],
    slots: Int[Tensor, "B T G"],
    rows: Int[Tensor, "B T"],
) -> tuple[Float[Tensor, "R G"], Float[Tensor, "R G"]]:
    """Relative error and fraction of the variance, per row and head."""
    R, G = means.shape[:2]
    x, absorbed = x.double(), (slots >= 0).double()
    heads = torch.arange(G, device=x.device)
    lost = x - means.double()[rows[..., None], heads, slots.clamp_min(0)]

    def summed(figure: Tensor) -> Tensor:
        """Over the absorbed tokens of each row, ``[R, G, ...]``."""
        weighted = figure * absorbed.view(*absorbed.shape, *[1] * (figure.ndim - 3))
        into = weighted.new_zeros(R, *weighted.shape[2:])
        return into.index_add(0, rows.flatten(), weighted.flatten(0, 1))

    total = summed(torch.ones_like(absorbed))
    mean = summed(x) / total.clamp_min(1)[..., None]
    error = summed(lost.square().sum(-1))

    def share(whole: Tensor) -> Tensor:
        part = torch.where(error > 0, error / whole, 0.0)
        return part.masked_fill(total == 0, torch.nan)

    around_mean = summed((x - mean[rows]).square().sum(-1))
    return share(summed(x.square().sum(-1))).sqrt(), share(around_mean)


def _check_tokens(
    state: OVQState, k: Tensor, v: Tensor, slots: Tensor, cu_seqlens: Tensor | None
) -> None:
    num_rows = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    held = (*state.counts.shape[:2], state.key_means.shape[-1], state.value_means.shape[-1])
    given = (num_rows, k.shape[2], k.shape[-1], v.shape[-1])
    if held != given:
        raise ValueError(
            f"state must have [rows, G, K, V] = {list(given)} for these tokens, got {list(held)}"
        )
    if v.shape[:3] != k.shape[:3] or slots.shape != k.shape[:3]:
        raise ValueError(
            f"v and slots must share B, T and G with k {tuple(k.shape)}, got {tuple(v.shape)} and "
            f"{tuple(slots.shape)}"
        )
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        if k.shape[0] != 1 or ends[0] != 0 or ends[-1] != k.shape[1] or sorted(ends) != ends:
            raise ValueError(
                f"cu_seqlens must rise from 0 to T of one batch row, got {ends} with k "
                f"{tuple(k.shape)}"
            )
    N = state.dictionary.num_centroids
    if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < N:
        raise ValueError(
            f"slots must lie in [-1, {N}), got {int(slots.min())} to {int(slots.max())}"
        )


@torch.no_grad()
def read_weights(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    beta: Float[Tensor, " H"],
    state: OVQState,
) -> ReadWeights:
    """The softmax weights with which the tokens of one chunk read dictionary, window and chunk.

    Their products with ``state.value_means`` and with ``state.tail_values`` and the values of the
    chunk add up to the output of :func:`~ovq.ops.ovq_attention.ovq_attention`.

    Args:
        q: queries ``[B, T, H, K]`` of the chunk, from its first token on.
        k: its keys ``[B, T, G, K]``.
        beta: inverse temperature of each query head ``[H]``.
        state: before the chunk; no row may have an unfinished chunk.

    Returns:
        Weights in the dtype of the state.

    Raises:
        ValueError: more tokens than a chunk, a state that stands inside a chunk, or sizes that do
            not fit the state.

    Example:
        >>> q = torch.nn.functional.normalize(torch.randn(1, 4, 2, 8), dim=-1)
        >>> dictionary = DictionaryConfig(num_centroids=16, chunk_size=4)
        >>> state = OVQState.empty(1, 2, 8, 8, dictionary=dictionary)
        >>> weights = read_weights(q, q, torch.full((2,), 8.0), state)
        >>> weights.dictionary.shape, weights.exact[0, 0, 0].tolist()
        (torch.Size([1, 4, 2, 16]), [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    """
    T, C, G = q.shape[1], state.dictionary.chunk_size, k.shape[2]
    held = (*state.counts.shape[:2], state.key_means.shape[-1])
    if held != (q.shape[0], G, k.shape[-1]):
        raise ValueError(
            f"state must have [rows, G, K] = {[q.shape[0], G, k.shape[-1]]} for these tokens, got "
            f"{list(held)}"
        )
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or q.shape[2] % G:
        raise ValueError(
            f"k must share B, T and K with q {tuple(q.shape)} and G divide H, got {tuple(k.shape)}"
        )
    if beta.shape != q.shape[2:3]:
        raise ValueError(f"beta must be [H] = [{q.shape[2]}], got {list(beta.shape)}")
    if T > C:
        raise ValueError(f"q must hold at most the {C} tokens of a chunk, got {T}")
    unfinished = state.num_tokens % C
    if bool(unfinished.any()):
        raise ValueError(
            f"state must stand at the start of a chunk, got unfinished chunks of "
            f"{unfinished.tolist()} tokens"
        )
    dtype = state.key_means.dtype
    scaled = by_group(q.to(dtype) * beta.to(dtype)[:, None], G)
    L = state.tail_keys.shape[1]
    in_tail = torch.arange(L, device=q.device) < state.tail_length[:, None, None]  # [B, 1, L]
    in_chunk = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    visible = torch.cat([in_tail.expand(len(q), T, L), in_chunk.expand(len(q), T, T)], dim=-1)
    exact = torch.cat([state.tail_keys, k.to(dtype)], dim=1).movedim(2, 1)
    centroids = read_keys(state.key_means, state.dictionary)
    logits = read_logits(scaled, exact, visible, centroids, state.counts)
    weights = logits.softmax(-1).unflatten(2, scaled.shape[2:4])
    of_dictionary, of_exact = weights.split([centroids.shape[2], L + T], dim=-1)
    return ReadWeights(from_groups(of_dictionary), from_groups(of_exact))
