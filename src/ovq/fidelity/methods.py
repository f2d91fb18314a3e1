"""Ways to remember a sequence in a given number of bytes, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ovq.fidelity.distributions import Sample
from ovq.ops.ovq_attention import DictionaryConfig, OVQState
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.ops.ovq_attention.state import Slots

CHUNK = 128
SINKS = 4
BLOCK = 512  # queries at a time


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to remember.

    Attributes:
        doc: what it is, in a few words.
        run: from a sample and bytes a sequence to the outputs of the second half, ``[T/2, H, V]``.
        swept: whether it is measured at every memory, or at ``N = T / 16`` alone.
        dictionary: of an OVQ method, all but ``num_centroids``.
    """

    doc: str
    run: Callable[[Sample, int], Tensor]
    swept: bool = False
    dictionary: dict[str, Any] = field(default_factory=dict)


def exact(sample: Sample) -> Float[Tensor, "S H V"]:
    """Full attention, for the second half of the tokens."""
    return windowed(sample, len(sample.q), 0)


def windowed(sample: Sample, window: int, num_first: int) -> Float[Tensor, "S H V"]:
    """Softmax attention to the first ``num_first`` tokens and the latest ``window``, second half.

    Args:
        sample: of ``T`` tokens.
        window: latest tokens that a token sees, itself among them.
        num_first: tokens from the start that every token sees beside them.
    """
    q, k, v = (x.transpose(0, 1) for x in (sample.q, sample.k, sample.v))  # [heads, T, dim]
    outputs = []
    length = len(sample.q)
    for start in range(length // 2, length, BLOCK):
        stop = min(start + BLOCK, length)
        oldest = max(num_first, start - window + 1)
        seen = torch.cat([torch.arange(num_first), torch.arange(oldest, stop)])
        queries = torch.arange(start, stop)[:, None]
        visible = (seen <= queries) & ((queries - seen < window) | (seen < num_first))
        outputs.append(
            F.scaled_dot_product_attention(
                q[None, :, start:stop], k[None, :, seen], v[None, :, seen], attn_mask=visible,
                scale=sample.beta, enable_gqa=True,
            )[0]
        )  # fmt: skip
    return torch.cat(outputs, dim=1).transpose(0, 1)


def state_bytes(sample: Sample, config: DictionaryConfig) -> int:
    """Bytes that OVQ's state holds for one sequence."""
    G, K, V = *sample.k.shape[1:], sample.v.shape[2]
    return OVQState.empty(1, G, K, V, dictionary=config, device="meta").num_bytes


def fitted(sample: Sample, num_bytes: int, fields: dict[str, Any]) -> DictionaryConfig:
    """The dictionary with the most slots that ``num_bytes`` hold.

    Raises:
        ValueError: they hold not even one slot.
    """
    least = DictionaryConfig(num_centroids=1, **fields)
    base = state_bytes(sample, least)
    per_slot = state_bytes(sample, replace(least, num_centroids=2)) - base
    count = 1 + (num_bytes - base) // per_slot
    if count < 1:
        raise ValueError(f"num_bytes must hold a slot and the tail, {base} bytes, got {num_bytes}")
    return replace(least, num_centroids=count)


def window_of(sample: Sample, num_bytes: int) -> int:
    """Tokens whose keys and values, in float32, ``num_bytes`` hold."""
    return num_bytes // (4 * (sample.k[0].numel() + sample.v[0].numel()))


def ovq(sample: Sample, num_bytes: int, fields: dict[str, Any], slots: Slots | None = None):
    """OVQ attention with a dictionary of these fields that fits."""
    config = fitted(sample, num_bytes, _with_length(fields, len(sample.q)))
    q, k, v = (x[None] for x in (sample.q, sample.k, sample.v))
    o, _, _ = ovq_attention_with_slots(q, k, v, sample.beta, dictionary=config, slots=slots)
    return o[0, len(sample.q) // 2 :]


def _with_length(fields: dict[str, Any], length: int) -> dict[str, Any]:
    linear = fields.get("growth") == "linear"
    return fields | ({"growth_length": length} if linear else {})


def offline_kmeans(sample: Sample, num_bytes: int) -> Tensor:
    """The slots of k-means over all keys, later ones too: the means are those of the past alone.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise ImportError(
            "offline_kmeans needs scikit-learn: pip install 'ovq[fidelity]'"
        ) from None
    fields = {"chunk_size": CHUNK}
    count = min(len(sample.k), fitted(sample, num_bytes, fields).num_centroids)
    once: Any = 1  # scikit-learn's own type of n_init is a string's
    kmeans = KMeans(count, init="random", n_init=once, max_iter=10, random_state=0, tol=0)
    labels = [kmeans.fit_predict(keys) for keys in sample.k.transpose(0, 1).numpy()]
    tokens = torch.stack([torch.from_numpy(of_head).long() for of_head in labels], -1)[None]
    tail = torch.full((1, CHUNK, tokens.shape[2]), -1)
    return ovq(sample, num_bytes, fields, Slots(tail, tokens))


def random_subset(sample: Sample, num_bytes: int) -> Tensor:
    """A random subset of the past, each standing for as many tokens as were passed over, and the
    present chunk exactly."""
    T, half = len(sample.q), len(sample.q) // 2
    count = window_of(sample, num_bytes) - CHUNK
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    outputs = []
    for start in range(half // CHUNK * CHUNK, T, CHUNK):
        kept = order[order < start][:count]
        stop = min(start + CHUNK, T)
        seen = torch.cat([kept, torch.arange(start, stop)])
        bias = torch.zeros(stop - start, len(seen))
        bias[:, : len(kept)] = torch.tensor(start / max(len(kept), 1)).log()
        bias.masked_fill_(seen > torch.arange(start, stop)[:, None], -torch.inf)
        q, k, v = (x.transpose(0, 1)[None] for x in (sample.q[start:stop], *_rows(sample, seen)))
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, scale=sample.beta, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)[-(T - half) :]


def _rows(sample: Sample, rows: Tensor) -> tuple[Tensor, Tensor]:
    return sample.k[rows], sample.v[rows]


def _ovq(doc: str, *, swept: bool = False, chunk_size: int = CHUNK, **fields: Any) -> Method:
    dictionary = {"chunk_size": chunk_size, **fields}
    return Method(
        doc=doc, swept=swept, dictionary=dictionary,
        run=lambda sample, num_bytes: ovq(sample, num_bytes, dictionary),
    )  # fmt: skip


PAPER = "ovq, paper"
# At unit norm, and for keys of any norm. A chunk of 64 and a window of 64 take the bytes of a chunk
# of 128.
WINNERS = ("ovq, novel unit, chunks of 64", "ovq, novel direction window")
METHODS: dict[str, Method] = {
    PAPER: _ovq("the paper's rule", swept=True),
    "ovq, chunks of 64": _ovq("the paper's rule", chunk_size=64),
    "ovq, linear": _ovq("growth in step with the sequence", growth="linear"),
    "ovq, immediate": _ovq("growth at once", growth="immediate"),
    "ovq, random": _ovq("random seeds", seeding="random"),
    "ovq, constant": _ovq("means move by a tenth", rate="constant"),
    "ovq, novel": _ovq("seeds unlike each other too", seeding="novel"),
    "ovq, unit": _ovq("centroids at unit norm", centroid="unit"),
    "ovq, direction": _ovq("compared by direction", centroid="direction"),
    "ovq, window": _ovq("64 exact tokens, chunks of 64", chunk_size=64, window_size=64),
    "ovq, novel unit": _ovq("both", seeding="novel", centroid="unit"),
    WINNERS[0]: _ovq("both", swept=True, chunk_size=64, seeding="novel", centroid="unit"),
    "ovq, novel unit immediate, chunks of 64": _ovq(
        "all three", chunk_size=64, seeding="novel", centroid="unit", growth="immediate"
    ),
    "ovq, novel unit window": _ovq(
        "all three", chunk_size=64, window_size=64, seeding="novel", centroid="unit"
    ),
    "ovq, novel direction": _ovq("both", seeding="novel", centroid="direction"),
    WINNERS[1]: _ovq(
        "all three", swept=True, chunk_size=64, window_size=64, seeding="novel",
        centroid="direction",
    ),
    "sliding window": Method(
        doc="the latest tokens", swept=True,
        run=lambda sample, num_bytes: windowed(sample, window_of(sample, num_bytes), 0),
    ),
    "sliding window, first tokens": Method(
        doc="the latest tokens and the first four", swept=True,
        run=lambda sample, num_bytes: windowed(
            sample, window_of(sample, num_bytes) - SINKS, SINKS
        ),
    ),
    "random subset": Method(doc="random tokens, weighted", swept=True, run=random_subset),
    "offline k-means": Method(
        doc="slots found with the whole sequence known", swept=True, run=offline_kmeans
    ),
}  # fmt: skip
