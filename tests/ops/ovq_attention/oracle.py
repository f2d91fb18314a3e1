"""OVQ attention in numpy, token by token, each slot with the list of its members: slow and obvious.

Written from the definition, not from the implementations, so that ``reference`` has a witness too.
"""

from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from ovq import DictionaryConfig


@dataclass
class Slot:
    """One slot: who joined, and where its centroids are."""

    key: np.ndarray
    value: np.ndarray
    members: list[int] = field(default_factory=list)


@dataclass
class Run:
    """One sequence through one key-value head."""

    config: DictionaryConfig
    keys: np.ndarray  # [T, K]
    values: np.ndarray  # [T, V]
    random: np.ndarray  # [T]
    slots: list[Slot] = field(default_factory=list)

    def read(self, key: np.ndarray) -> np.ndarray:
        """A key centroid as queries see it."""
        return unit(key) if self.config.centroid == "unit" else key

    def compared(self, key: np.ndarray) -> np.ndarray:
        """A key centroid as keys that look for a slot see it."""
        return key if self.config.centroid == "mean" else unit(key)

    def attend(self, query: np.ndarray, beta: float, own: range) -> np.ndarray:
        """One softmax over the dictionary and the exact tokens ``own``."""
        logits = [beta * query @ self.read(s.key) + log(len(s.members)) for s in self.slots]
        logits += [beta * query @ self.keys[j] for j in own]
        values = [s.value for s in self.slots] + [self.values[j] for j in own]
        weights = [exp(logit - max(logits)) for logit in logits]
        return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)

    def num_active(self, absorbed: int) -> int:
        """Slots once ``absorbed`` tokens are in."""
        N, n, C = self.config.num_centroids, len(self.slots), self.config.chunk_size
        scheduled = {
            "saturating": N * absorbed // (absorbed + N),
            "linear": N * absorbed // (self.config.growth_length or 1),
            "immediate": min(N, absorbed),
        }[self.config.growth]
        return max(n, min(n + C, N, max(1, scheduled)))

    def seed_score(self, token: int, start: int) -> float:
        """How well a key is served already; the smallest scores seed."""
        if self.config.seeding == "random":
            return float(self.random[token])
        known = [self.compared(s.key) for s in self.slots]
        if self.config.seeding == "novel":
            known += [self.keys[j] for j in range(start, token)]
        return max((rounded(self.keys[token] @ key) for key in known), default=-np.inf)

    def absorb(self, start: int) -> dict[int, int]:
        """Update with the chunk at ``start``; the slot of each of its tokens."""
        chunk = range(start, start + self.config.chunk_size)
        num_new = self.num_active(chunk.stop) - len(self.slots)
        by_score = sorted(chunk, key=lambda i: (self.seed_score(i, start), i))
        seeds = sorted(by_score[:num_new])
        num_old = len(self.slots)
        joined = {token: num_old + new for new, token in enumerate(seeds)}
        self.slots += [Slot(self.keys[i], self.values[i]) for i in seeds]
        centroids = [self.compared(s.key) for s in self.slots]
        for token in chunk:
            if token not in joined:
                products = [rounded(self.keys[token] @ c) for c in centroids]
                joined[token] = products.index(max(products))
        for m, slot in enumerate(self.slots):
            self.move(slot, [i for i in chunk if joined[i] == m], is_new=m >= num_old)
        return joined

    def move(self, slot: Slot, new: list[int], is_new: bool) -> None:
        """The slot's centroids with its new members."""
        slot.members += new
        if not new:
            return
        if self.config.rate == "mean" or is_new:
            slot.key = self.keys[slot.members].mean(0)
            slot.value = self.values[slot.members].mean(0)
        else:
            slot.key = slot.key + self.config.step * (self.keys[new].mean(0) - slot.key)
            slot.value = slot.value + self.config.step * (self.values[new].mean(0) - slot.value)


def unit(key: np.ndarray) -> np.ndarray:
    """The key scaled to unit norm."""
    return key / max(float(np.sqrt((key**2).sum())), 1e-6)


def rounded(product: float) -> float:
    """The product on the grid of 2^-16."""
    return float(np.round(product * 2.0**16) / 2.0**16)


def ovq_by_members(q, k, v, beta, random, config: DictionaryConfig):
    """One sequence, one key-value head.

    Args:
        q: ``[T, J, K]`` of the query heads that share the key-value head.
        k: ``[T, K]``.
        v: ``[T, V]``.
        beta: ``[J]``.
        random: ``[T]`` scores for ``seeding="random"``.
        config: any.

    Returns:
        Output ``[T, J, V]``, the final slots, and the slot of each token (-1: not absorbed).
    """
    head, C, W = Run(config, k, v, random), config.chunk_size, config.window_size
    o, joined = np.zeros((*q.shape[:2], v.shape[-1])), np.full(len(k), -1)
    for i in range(len(k)):
        start = i // C * C
        for h in range(q.shape[1]):
            o[i, h] = head.attend(q[i, h], float(beta[h]), range(max(0, start - W), i + 1))
        if i + 1 == start + C and start >= W:
            for token, slot in head.absorb(start - W).items():
                joined[token] = slot
    return o, head.slots, joined
