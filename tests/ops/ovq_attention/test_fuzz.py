"""Random shapes, splits, packings, dtypes and extreme values: all implementations, one answer.

A case is a few sequences, each read in several calls that carry the state, as a batch or packed. It
is compared with one call of ``reference`` in float64 on the same rounded numbers and its slots. How
near it must be comes from what ``reference`` itself loses in the case's dtype.

Not compared: keys of several norms in a ``unit`` dictionary. Where large ones cancel or are taken
out again, a centroid's direction is that of rounding, in the backward another than in the forward.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ovq import DictionaryConfig, OVQState
from ovq.ops.ovq_attention.cpu import kernel
from ovq.ops.ovq_attention.state import Slots, working_dtype

from .cases import (
    VARIANTS,
    WHOLE_FIELDS,
    Inputs,
    by_implementation,
    generator,
    gradients,
    make_config,
    phased_state,
    real_tensors,
    run,
    state_leaves,
    unit_vectors,
    zipf_vectors,
)

SEEDED_AND_GROWN = ("paper", "linear", "immediate", "random", "novel")
MODERATE = 100.0  # the largest |beta| |q| |k| at which results are compared


def identical_vectors(*shape: int, seed: int) -> Tensor:
    """One unit vector for all."""
    return unit_vectors(shape[-1], seed=seed).expand(shape).clone()


KEYS = {"unit": unit_vectors, "zipf": zipf_vectors, "identical": identical_vectors}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case, as hypothesis draws it.

    Attributes:
        edges: of each sequence, where its calls start and end: as many numbers for each.
        packed: whether calls are packed; if not, the sequences share their edges.
        past: of each sequence, the tokens in the state that comes in; ``None`` for no state.
        sizes: ``(H, G, K, V)``.
        key_norms: mixed at random over the keys.
        beta: of all heads.
    """

    edges: tuple[tuple[int, ...], ...]
    packed: bool = False
    past: tuple[int, ...] | None = None
    sizes: tuple[int, int, int, int] = (4, 2, 5, 3)
    num_centroids: int = 6
    chunk_size: int = 4
    variant: str = "paper"
    centroid: str = "mean"
    window_chunks: int = 0
    keys: str = "unit"
    key_norms: tuple[float, ...] = (1.0,)
    query_norm: float = 1.0
    beta: float = 4.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def config(self) -> DictionaryConfig:
        """Its dictionary."""
        fields = {"centroid": self.centroid, "window_chunks": self.window_chunks}
        fields |= VARIANTS[self.variant]
        return make_config(self.num_centroids, self.chunk_size, **fields)

    @property
    def ends(self) -> Tensor:
        """Where the sequences end when they lie end to end."""
        return torch.tensor([0, *(edges[-1] for edges in self.edges)]).cumsum(0)

    def inputs(self) -> Inputs:
        """All sequences end to end in one row, in the case's dtype."""
        H, G, K, V = self.sizes
        P, draw = int(self.ends[-1]), generator(self.seed)
        choice = torch.randint(len(self.key_norms), (1, P, G, 1), generator=draw)
        norms = torch.tensor(self.key_norms, dtype=torch.float64)[choice]
        return Inputs(
            q=self.query_norm * unit_vectors(1, P, H, K, seed=self.seed),
            k=norms * KEYS[self.keys](1, P, G, K, seed=self.seed + 1),
            v=torch.randn(1, P, G, V, generator=draw, dtype=torch.float64),
            beta=torch.full((H,), self.beta, dtype=torch.float64),
        ).to(self.dtype)

    def state(self) -> OVQState | None:
        """The incoming state in the dtype that a state has in the case's dtype."""
        if self.past is None:
            return None
        sizes = dict(zip("HGKV", self.sizes, strict=True))
        state = phased_state(self.config, self.past, seed=self.seed + 2, **sizes)
        return in_dtype(state, working_dtype(self.dtype))


def in_dtype(state: OVQState | None, dtype: torch.dtype) -> OVQState | None:
    """The state with its real tensors in another dtype."""
    if state is None:
        return None
    return state.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


@st.composite
def cases(draw, *, beyond: bool = False) -> Case:
    """Cases with ``|beta| |q| |k|`` up to 100, or (``beyond``) with any of the three huge."""
    packed, num_rows = draw(st.booleans()), draw(st.integers(1, 4))
    num_calls, C = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 16, 33]))
    length = st.integers(0, min(30, 4 * C))
    sequence = st.lists(length, min_size=num_calls, max_size=num_calls)
    sequences = [tuple(draw(sequence)) for _ in range(num_rows if packed else 1)] * (
        1 if packed else num_rows
    )
    G, J = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    centroid = draw(st.sampled_from(["mean", "unit", "direction"]))
    unit = not beyond and centroid == "unit"
    norms = st.sampled_from([0.0, 1e-2, 1.0, 1e4])
    key_norms = [1.0] if unit else draw(st.lists(norms, min_size=1, max_size=3))
    query_norm = draw(st.sampled_from([0.0, 1e-3, 1.0, 1e4] if beyond else [0.0, 1e-3, 1.0, 30.0]))
    pasts = st.lists(st.integers(0, min(40, 6 * C)), min_size=num_rows, max_size=num_rows)
    past = draw(st.none() | pasts)
    if beyond:
        beta = draw(st.sampled_from([-1e3, 0.0, 1.0, 1e3]))
    else:
        largest = max(*key_norms, 1.0 if past else 0.0)  # the keys of the past have unit norm
        logit = draw(st.sampled_from([-10.0, 0.0, 1.0, 10.0, MODERATE]))
        beta = max(-1e3, min(1e3, logit / max(1e-9, query_norm * largest)))
    return Case(
        edges=tuple(tuple(sum(parts[:i]) for i in range(num_calls + 1)) for parts in sequences),
        packed=packed,
        past=None if past is None else tuple(past),
        sizes=(
            G * J,
            G,
            draw(st.sampled_from([8, 17, 32] if unit else [1, 3, 8, 17, 32])),
            draw(st.sampled_from([1, 4, 16, 33])),
        ),
        num_centroids=draw(st.sampled_from([1, 2, 7, 24, 100])),
        chunk_size=C,
        variant=draw(st.sampled_from(SEEDED_AND_GROWN)),
        centroid=centroid,
        window_chunks=draw(st.integers(0, 2)),
        keys=draw(st.sampled_from(sorted(KEYS))),
        key_norms=tuple(key_norms),
        query_norm=query_norm,
        beta=beta,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        seed=draw(st.integers(0, 9)),
    )


def calls_of(case: Case, slots: Slots | None) -> Iterator[tuple[Tensor, Slots | None]]:
    """Of each call, the places of its tokens in the one row, and the slots it is to use."""
    num_rows, config = len(case.edges), case.config
    seen = case.past or (0,) * num_rows
    past = [n - config.num_absorbed_after(n) for n in seen]  # of these, in the first tail
    for start, stop in pairwise(zip(*case.edges, strict=True)):
        begins = case.ends[:-1].tolist()
        spans = [torch.arange(b + i, b + j) for b, i, j in zip(begins, start, stop, strict=True)]
        places = torch.cat(spans)
        if slots is None:
            yield places, None
            continue
        tail = torch.full((num_rows, config.tail_size, slots.tokens.shape[2]), -1)
        for row, begin in enumerate(begins):
            so_far = [slots.tail[row, : past[row]], slots.tokens[0, begin : begin + start[row]]]
            num_tokens = seen[row] + start[row]
            waiting = num_tokens - config.num_absorbed_after(num_tokens)
            tail[row, :waiting] = torch.cat(so_far)[past[row] + start[row] - waiting :]
        yield places, Slots(tail, slots.tokens[:, places])


def in_calls(case: Case, inputs: Inputs, impl: str, state: OVQState | None, slots: Slots | None):
    """The case call by call; output of all tokens in the one row, and the state after."""
    num_rows, parts, order = len(case.edges), [], []
    lengths = [[j - i for i, j in pairwise(edges)] for edges in case.edges]
    for call, (places, fed) in enumerate(calls_of(case, slots)):
        tokens, options = [x[:, places] for x in inputs[:3]], {}
        if case.packed:
            ends = torch.tensor([0, *(row[call] for row in lengths)]).cumsum(0)
            options["cu_seqlens"] = ends
        else:
            shape = (num_rows, lengths[0][call])
            tokens = [x[0].unflatten(0, shape) for x in tokens]
            fed = fed and fed._replace(tokens=fed.tokens[0].unflatten(0, shape))
        o, state, _ = run(
            Inputs(*tokens, inputs.beta), case.config, impl, state, slots=fed, **options
        )
        assert o.shape == (*tokens[0].shape[:3], case.sizes[3])
        assert o.dtype == case.dtype
        parts.append(o.flatten(0, 1))
        order.append(places)
    return torch.cat(parts)[torch.cat(order).argsort()][None], state


def results(inputs: Inputs, state: OVQState | None, attend) -> tuple[list[Tensor], OVQState]:
    """Output, returned state and all gradients of ``attend(inputs, state)``; the state after."""
    leaves = list(inputs.leaves())
    own, of_state = Inputs(*leaves), []
    if state is not None:
        state, of_state = state_leaves(state)
    o, after = attend(own, state)
    tensors = real_tensors(o, after)
    found = [x.detach() for x in tensors] + gradients(tensors, leaves + of_state)
    wanted = [x.shape for x in tensors] + [x.shape for x in leaves + of_state]
    assert [x.shape for x in found] == wanted
    return found, after


def scales(case: Case, inputs: Inputs) -> list[float]:
    """Of output, state and gradients, the size of one contribution: what rounding is relative to.

    A gradient may be the small difference of many such contributions, or zero; that of beta sums
    them over all tokens.
    """
    q, k, v = (float(x.double().norm(dim=-1).max()) if x.numel() else 0.0 for x in inputs[:3])
    k, beta = max(k, 1.0 if case.past else 0.0), abs(case.beta)
    of_key, of_beta = beta * q * v + 1.0, q * k * v * int(case.ends[-1]) ** 0.5
    return [v, k, v, k, v, beta * k * v, of_key, 1.0, of_beta, *(of_key, 1.0) * 2]


def rounding(case: Case) -> float:
    """What is granted beside ten times what ``reference`` loses, relative to :func:`scales`.

    The dtype's own rounding, and that of the backward: it recovers the mean of a slot's first
    members from the last, rounded mean of all, so an early logit is off by its size times the
    number of chunks.
    """
    q_k = case.query_norm * max(*case.key_norms, 1.0)
    chunks = max(edges[-1] for edges in case.edges) / case.chunk_size
    own, work = (torch.finfo(x).eps for x in (case.dtype, working_dtype(case.dtype)))
    return own + work / 2 * (100 + abs(case.beta) * q_k * chunks)


NAMES = ["output", "key_means", "value_means", "tail_keys", "tail_values"]
NAMES += [f"gradient of {name}" for name in ["q", "k", "v", "beta", *NAMES[1:]]]


@lru_cache(maxsize=256)  # one for all implementations
def wanted(case: Case) -> tuple[Slots, OVQState, list[Tensor], list[float]]:
    """By one call of ``reference`` in float64: slots, state after, and results; what it loses of
    these in the case's own dtype."""
    inputs, state = case.inputs(), case.state()
    exact = inputs.to(torch.float64), in_dtype(state, torch.float64)
    options = {"cu_seqlens": case.ends}
    slots = run(exact[0], case.config, "reference", exact[1], **options)[2]

    def whole(own: Inputs, start: OVQState | None):
        return run(own, case.config, "reference", start, slots=slots, **options)[:2]

    expected, after = results(*exact, whole)
    rounded, _ = results(inputs, state, whole)
    lost = [float((a.double() - b).norm()) for a, b in zip(rounded, expected, strict=True)]
    return slots, after.detach(), expected, lost


def compare(case: Case, impl: str) -> None:
    """One case against ``reference``, its slots fed."""
    inputs, state = case.inputs(), case.state()
    slots, after, expected, lost = wanted(case)
    found, found_after = results(
        inputs, state, lambda own, start: in_calls(case, own, impl, start, slots)
    )
    for name in WHOLE_FIELDS:
        assert torch.equal(getattr(found_after, name), getattr(after, name)), name
    many = zip(NAMES, found, expected, lost, scales(case, inputs), strict=False)
    for name, mine, right, low, scale in many:
        error, size = float((mine.double() - right).norm()), float(right.norm()) + scale
        bound = 10 * low + rounding(case) * size
        assert error <= bound, f"{name}: off by {error:.3g}, more than {bound:.3g} of {size:.3g}"


def served(impl: str, case: Case) -> Case:
    """The case in a dtype that the implementation takes."""
    if impl == "cpu" and case.dtype not in kernel.DTYPES:
        return replace(case, dtype=torch.float32)
    return case


@by_implementation
@settings(max_examples=200 if os.environ.get("OVQ_LONG") == "1" else 35)
@given(case=cases())
def test_equals_reference_while_logits_are_moderate(impl, case):
    compare(served(impl, case), impl)


@by_implementation
@settings(max_examples=30)
@given(case=cases(beyond=True))
def test_everything_is_finite_beyond(impl, case):
    case = served(impl, case)
    inputs = case.inputs()
    found, after = results(
        inputs, case.state(), lambda own, start: in_calls(case, own, impl, start, None)
    )
    assert all(x.isfinite().all() for x in found)
    lengths = torch.tensor(case.past or (0,) * len(case.edges)) + case.ends.diff()
    assert torch.equal(after.num_tokens, lengths)
    assert (after.counts.sum(-1) == after.num_absorbed[:, None]).all()
    largest = max((float(x.abs().max()) for x in (inputs.v,) if x.numel()), default=0.0)
    if case.past is None and inputs.v.numel():  # weighted means of values
        assert float(found[0].abs().max()) <= largest * 1.01


LONG: Sequence[Case] = (
    Case(edges=((0, 1000, 3000),), keys="zipf", num_centroids=100, chunk_size=64, beta=20.0),
    Case(
        edges=((0, 7, 2048), (0, 0, 300), (0, 900, 901)), packed=True, past=(70, 0, 64),
        sizes=(2, 1, 16, 8), num_centroids=64, chunk_size=48, variant="novel",
        key_norms=(0.0, 1.0, 1e4), beta=1e-2, dtype=torch.bfloat16,
    ),
    Case(edges=((0, 1999, 2000),), keys="identical", num_centroids=300, chunk_size=100, beta=50.0),
    Case(
        edges=((0, 950, 2100),), past=(200,), keys="zipf", num_centroids=100, chunk_size=48,
        window_chunks=2, centroid="direction", key_norms=(0.5, 2.0), beta=5.0,
    ),
)  # fmt: skip


@by_implementation
@pytest.mark.parametrize("case", LONG, ids=["zipf", "packed", "identical", "window"])
def test_thousands_of_tokens(impl, case):
    compare(case, impl)
