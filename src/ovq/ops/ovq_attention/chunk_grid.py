"""Where the tokens of a call stand on the chunk grid of their sequences: integers alone.

Chunks are counted from the first token of each sequence, so the rows of a call may stand at
different phases: because sequences are packed, or because decoding rows are. The grid turns all of
that into indices into one flat list of tokens, and nothing behind it needs to know how the call was
made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ovq.ops.ovq_attention.dictionary import DictionaryConfig


class Chunk(NamedTuple):
    """One chunk of the grid, for the rows that have tokens of this call in it.

    Attributes:
        rows: ``[r]`` the rows of the state concerned, ascending.
        keys: ``[r, E]`` where the exact tokens, those of the window before the chunk and then its
            own, stand in the flat list.
        queries: ``[r, w]`` where the call's own tokens of this chunk stand there.
        query_places: ``[r, w]`` where these queries stand, counted from the first exact token.
        key_places: ``[E]`` where the exact tokens stand, counted likewise.
        visible: ``[r, w, E]`` the exact tokens that each query attends to: those at or before it.
        leaving: ``[f]`` the places in ``rows`` of those that now absorb a chunk: the first ``C`` of
            the exact tokens.
    """

    rows: Int[Tensor, " r"]
    keys: Int[Tensor, "r E"]
    queries: Int[Tensor, "r w"]
    query_places: Int[Tensor, "r w"]
    key_places: Int[Tensor, " E"]
    visible: Bool[Tensor, "r w E"]
    leaving: Int[Tensor, " f"]


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a call.

    The flat list has the ``R * L`` places of the tails, the ``B * T`` tokens of the call, and one
    empty place, to which every index beyond a row's end points. Positions count from the tail's
    start, which is on the grid: a tail shorter than the window starts its sequence.

    Attributes:
        tail_length: ``[R]`` tokens that came in with the state, on the CPU.
        length: ``[R]`` those and the tokens of the call.
        first: ``[R]`` where the first token of the call stands in the flat list.
        chunk_size: ``C``.
        window_size: ``W``.
        empty: the place of the empty token.
        device: of the indices given out.
    """

    tail_length: Int[Tensor, " R"]
    length: Int[Tensor, " R"]
    first: Int[Tensor, " R"]
    chunk_size: int
    window_size: int
    empty: int
    device: torch.device

    @classmethod
    def of(
        cls,
        batch_size: int,
        num_tokens: int,
        tail_length: Int[Tensor, " R"],
        cu_seqlens: Int[Tensor, " ends"] | None,
        dictionary: DictionaryConfig,
    ) -> "ChunkGrid":
        """The grid of a call on ``[B, T]`` tokens, packed where ``cu_seqlens`` is given."""
        tails, num_rows = tail_length.cpu(), len(tail_length)
        if cu_seqlens is None:
            starts = torch.arange(batch_size) * num_tokens
            lengths = torch.full((batch_size,), num_tokens)
        else:
            ends = cu_seqlens.cpu().long()
            starts, lengths = ends[:-1], ends.diff()
        before = num_rows * dictionary.tail_size
        return cls(
            tail_length=tails,
            length=tails + lengths,
            first=before + starts,
            chunk_size=dictionary.chunk_size,
            window_size=dictionary.window_size,
            empty=before + batch_size * num_tokens,
            device=tail_length.device,
        )

    @property
    def tail_size(self) -> int:
        """Places of a row's tail in the flat list, ``L``."""
        return self.window_size + self.chunk_size

    @property
    def num_tail_places(self) -> int:
        """Places of all tails in the flat list: there the tokens of the call begin."""
        return len(self.length) * self.tail_size

    @property
    def num_full(self) -> Int[Tensor, " R"]:
        """Tokens of each row that are absorbed by the end of the call, tails included."""
        whole = self.length // self.chunk_size * self.chunk_size
        return (whole - self.window_size).clamp_min(0)

    def places(self, rows: Int[Tensor, " r"], positions: Int[Tensor, "r p"]) -> Int[Tensor, "r p"]:
        """Where the tokens at ``positions``, counted from the tail's start, are in the list."""
        tail = self.tail_length[rows, None]
        in_tail = rows[:, None] * self.tail_size + positions
        in_call = self.first[rows, None] + positions - tail
        index = torch.where(positions < tail, in_tail, in_call)
        return index.masked_fill(positions >= self.length[rows, None], self.empty)

    def chunk(self, j: int) -> Chunk:
        """Chunk ``j``."""
        C, start = self.chunk_size, j * self.chunk_size
        oldest = max(0, start - self.window_size)
        first = self.tail_length.clamp_min(start)  # of the call's tokens, in the chunk or beyond
        rows = (first < self.length.clamp_max(start + C)).nonzero().flatten()
        tail, length = self.tail_length[rows], self.length[rows]
        offset = (tail - start).clamp_min(0)  # of each row's first query in the chunk
        num_queries = (length - start).clamp_max(C) - offset
        step = torch.arange(int(num_queries.max()) if len(rows) else 0)
        query_offset = offset[:, None] + step  # [r, w]
        queries = self.places(rows, start + query_offset)
        queries = queries.masked_fill(step >= num_queries[:, None], self.empty)
        key_places = torch.arange(start + C - oldest)
        query_places = start - oldest + query_offset
        visible = key_places <= query_places[..., None]
        keys = self.places(rows, (oldest + key_places).expand(len(rows), -1))
        leaving = ((length >= start + C) & (start >= self.window_size)).nonzero().flatten()
        indices = (rows, keys, queries, query_places, key_places, visible, leaving)
        return Chunk(*(tensor.to(self.device) for tensor in indices))

    def chunks(self, reverse: bool = False) -> Iterator[Chunk]:
        """All chunks that hold a token of the call, in order or from the last."""
        if not len(self.length):
            return
        stop = -(-int(self.length.max()) // self.chunk_size)
        order = range(int(self.tail_length.min()) // self.chunk_size, stop)
        for j in reversed(order) if reverse else order:
            chunk = self.chunk(j)
            if len(chunk.rows):
                yield chunk

    def tail_places(self) -> Int[Tensor, "R L"]:
        """Where the tokens of the tails after the call stand in the flat list, ``[R, L]``."""
        rows = torch.arange(len(self.length))
        steps = self.num_full[:, None] + torch.arange(self.tail_size)
        return self.places(rows, steps).to(self.device)
