"""Tokens of VQ attention in blocks: those of a state's tail and the new ones, and sums by code."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ovq.ops.vq_state import VQState, tail_length


@dataclass(frozen=True, kw_only=True)
class Line:
    """The tail of the state and the new tokens of each row, joined without a gap and cut in blocks.

    Rows may stand at different places of their block, but a tail begins with one: so all rows have
    their blocks at the same places of the line.

    Attributes:
        keys: ``[B, n, C, G, K]``, quantized; past the last token of a row there is no meaning.
        raw_keys: the same before they were quantized, where they came with this call.
        values: ``[B, n, C, G, V]``.
        assigned: ``[B, n, C, G]``.
        start: the state before.
        first: ``[B]``, the place of the first new token.
        num_new: ``T``.
    """

    keys: Float[Tensor, "B n C G K"]
    raw_keys: Float[Tensor, "B n C G K"]
    values: Float[Tensor, "B n C G V"]
    assigned: Int[Tensor, "B n C G"]
    start: VQState
    first: Int[Tensor, " B"]
    num_new: int

    @classmethod
    def of(
        cls,
        k_hat: Float[Tensor, "B T G K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        assigned: Int[Tensor, "B T G"],
        state: VQState | None,
        num_codes: int,
        block_size: int,
    ) -> "Line":
        """The line of quantized keys, the keys themselves, values and codes after a state."""
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
            return at(pool, source).unflatten(1, (num_blocks, block_size))

        return cls(
            keys=joined(state.tail_keys, k_hat),
            raw_keys=joined(state.tail_keys, k),
            values=joined(state.tail_values, v),
            assigned=joined(state.tail_assigned, assigned),
            start=state,
            first=first,
            num_new=T,
        )

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    def counts_before_blocks(self) -> Int[Tensor, "B n G S"]:
        """Tokens of each code: the state's, then with each block but the last."""
        assigned, counts = self.assigned[:, :-1].transpose(2, 3), self.start.counts[:, None]
        ones = torch.ones_like(assigned)
        of_blocks = ones.new_zeros(*ones.shape[:3], counts.shape[3]).scatter_add(3, assigned, ones)
        return torch.cat([counts, of_blocks], dim=1).cumsum(1)

    def sums_before_blocks(
        self, x: Float[Tensor, "B n C G F"], means: Float[Tensor, "... G S F"]
    ) -> Float[Tensor, "B n G S F"]:
        """The same of vectors of the tokens, from their means over the tokens of the state."""
        x, assigned = x[:, :-1].transpose(2, 3), self.assigned[:, :-1].transpose(2, 3)
        sums = means.to(x.dtype) * self.start.counts[..., None]
        of_blocks = x.new_zeros(*x.shape[:3], *sums.shape[2:]).scatter_add(
            3, assigned[..., None].expand_as(x), x
        )
        return torch.cat([sums[:, None], of_blocks], dim=1).cumsum(1)

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
            return torch.where(mask, at(x.flatten(1, 2), places), 0)

        counts_after = at(counts, num_absorbed[:, None])[:, 0]
        sums_after = at(sums, num_absorbed[:, None])[:, 0]
        return VQState(
            value_means=sums_after / counts_after.clamp_min(1)[..., None],
            counts=counts_after,
            tail_keys=of_tail(self.keys),
            tail_values=of_tail(self.values),
            tail_assigned=of_tail(self.assigned),
            num_tokens=self.start.num_tokens + self.num_new,
        )


def at(x: Shaped[Tensor, "B P *F"], places: Int[Tensor, "B Q"]) -> Shaped[Tensor, "B Q *F"]:
    """The entries of each row at its own places."""
    index = places.view(*places.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)
