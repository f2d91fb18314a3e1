"""What VQ attention remembers: a mean of values and a count per code, and the last two blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

TENSOR_NAMES = (
    "value_means", "counts", "tail_keys", "tail_values", "tail_assigned", "num_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VQState:
    """The state of VQ attention, an immutable value of constant size with one row a sequence.

    Tokens up to the block before the present one are in the means; the others, in order, are the
    tail: all while there are fewer than ``C``, and ``C`` to ``2C - 1`` of them from then on.

    Attributes:
        value_means: ``[B, G, S, V]`` float32, float64 for float64 inputs: the mean of the values of
            all tokens whose key has the code; zero where there is none.
        counts: ``[B, G, S]`` int64, the number of those tokens.
        tail_keys: ``[B, 2C - 1, G, K]``, quantized, zero past the tail.
        tail_values: ``[B, 2C - 1, G, V]``.
        tail_assigned: ``[B, 2C - 1, G]`` int64, the code of each key.
        num_tokens: ``[B]`` int64, tokens seen by each row.
    """

    value_means: Float[Tensor, "B G S V"]
    counts: Int[Tensor, "B G S"]
    tail_keys: Float[Tensor, "B L G K"]
    tail_values: Float[Tensor, "B L G V"]
    tail_assigned: Int[Tensor, "B L G"]
    num_tokens: Int[Tensor, " B"]

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        num_codes: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "VQState":
        """The state before the first token, in float64 if ``dtype`` is, in float32 otherwise."""
        B, G, L = num_rows, num_kv_heads, 2 * block_size - 1
        real = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
        whole = {"dtype": torch.int64, "device": device}
        return cls(
            value_means=torch.zeros(B, G, num_codes, value_dim, **real),
            counts=torch.zeros(B, G, num_codes, **whole),
            tail_keys=torch.zeros(B, L, G, key_dim, **real),
            tail_values=torch.zeros(B, L, G, value_dim, **real),
            tail_assigned=torch.zeros(B, L, G, **whole),
            num_tokens=torch.zeros(B, **whole),
        )

    @classmethod
    def concat(cls, states: Sequence["VQState"]) -> "VQState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or their heads, dimensions, codes or blocks differ.
        """
        shapes = {
            tuple(tuple(tensor.shape[1:]) for tensor in state.tensors().values())
            for state in states
        }
        if len(shapes) != 1:
            raise ValueError(f"states must share one shape of their rows, got {sorted(shapes)}")
        rows = {name: [getattr(state, name) for state in states] for name in TENSOR_NAMES}
        return cls(**{name: torch.cat(tensors) for name, tensors in rows.items()})

    @property
    def num_rows(self) -> int:
        """Number of sequences ``B``."""
        return self.num_tokens.shape[0]

    @property
    def block_size(self) -> int:
        """The block ``C`` it was made with."""
        return (self.tail_keys.shape[1] + 1) // 2

    @property
    def tail_length(self) -> Int[Tensor, " B"]:
        """Tokens of each row that are not in the means."""
        return tail_length(self.num_tokens, self.block_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors: the same number after any number of tokens."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        return {name: getattr(self, name) for name in TENSOR_NAMES}

    def select_rows(self, rows: Int[Tensor, " R"]) -> "VQState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "VQState":
        """The same numbers, cut from the autograd graph."""
        return self.map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "VQState":
        """The same state on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "VQState":
        """The state with ``function`` applied to each tensor."""
        return replace(self, **{name: function(t) for name, t in self.tensors().items()})


def tail_length(num_tokens: Int[Tensor, " B"], block_size: int) -> Int[Tensor, " B"]:
    """Tokens after the last that is in the means: those of the unfinished block and the one before.

    Example:
        >>> tail_length(torch.tensor([2, 3, 4, 5, 6]), 3).tolist()
        [2, 3, 4, 5, 3]
    """
    in_block = num_tokens % block_size
    return torch.where(num_tokens < block_size, num_tokens, block_size + in_block)
