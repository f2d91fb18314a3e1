"""What OVQ attention remembers: two dictionaries, their counts, and the tokens not absorbed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.dictionary import DictionaryConfig
from ovq.ops.state_file import StateFile

TENSOR_NAMES = (
    "key_means", "value_means", "counts", "num_active", "num_absorbed", "tail_keys", "tail_values",
    "tail_length",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OVQState:
    """The state of OVQ attention, an immutable value of constant size with one row a sequence.

    For every active slot ``m``: ``key_means[m]`` is the mean of the keys assigned to it,
    ``value_means[m]`` the mean of their values, ``counts[m]`` their number.

    Attributes:
        key_means: ``[R, G, N, K]``, zero in slots that are not active.
        value_means: ``[R, G, N, V]``.
        counts: ``[R, G, N]`` int64.
        num_active: ``[R]`` int64, active slots, the same for every head.
        num_absorbed: ``[R]`` int64, tokens in the dictionary.
        tail_keys: ``[R, L, G, K]``, the keys of the tokens that are not absorbed (the window and
            the unfinished chunk, ``L = W + C``), zero past ``tail_length``.
        tail_values: ``[R, L, G, V]``.
        tail_length: ``[R]`` int64, below ``L``.
        dictionary: the configuration it was made with.
    """

    key_means: Float[Tensor, "R G N K"]
    value_means: Float[Tensor, "R G N V"]
    counts: Int[Tensor, "R G N"]
    num_active: Int[Tensor, " R"]
    num_absorbed: Int[Tensor, " R"]
    tail_keys: Float[Tensor, "R L G K"]
    tail_values: Float[Tensor, "R L G V"]
    tail_length: Int[Tensor, " R"]
    dictionary: DictionaryConfig

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        dictionary: DictionaryConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "OVQState":
        """The state before the first token, in float64 if ``dtype`` is, in float32 otherwise."""
        R, G, N, L = num_rows, num_kv_heads, dictionary.num_centroids, dictionary.tail_size
        real = {"dtype": working_dtype(dtype), "device": device}
        whole = {"dtype": torch.int64, "device": device}
        return cls(
            key_means=torch.zeros(R, G, N, key_dim, **real),
            value_means=torch.zeros(R, G, N, value_dim, **real),
            counts=torch.zeros(R, G, N, **whole),
            num_active=torch.zeros(R, **whole),
            num_absorbed=torch.zeros(R, **whole),
            tail_keys=torch.zeros(R, L, G, key_dim, **real),
            tail_values=torch.zeros(R, L, G, value_dim, **real),
            tail_length=torch.zeros(R, **whole),
            dictionary=dictionary,
        )

    @classmethod
    def concat(cls, states: Sequence["OVQState"]) -> "OVQState":
        """One state with the rows of several, in order.

        Raises:
            ValueError: no state given, or their configurations differ.
        """
        if not states:
            raise ValueError("states must hold at least one state, got none")
        first = states[0]
        for other in states[1:]:
            if other.dictionary != first.dictionary:
                raise ValueError(
                    f"states must share one dictionary configuration, got {first.dictionary} and "
                    f"{other.dictionary}"
                )
        joined = {name: torch.cat([getattr(s, name) for s in states]) for name in TENSOR_NAMES}
        return replace(first, **joined)

    @property
    def num_rows(self) -> int:
        """Number of sequences ``R``."""
        return self.counts.shape[0]

    @property
    def num_tokens(self) -> Int[Tensor, " R"]:
        """Tokens seen by each row, absorbed or not yet, ``[R]`` int64."""
        return self.num_absorbed + self.tail_length

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors: the same number from the first token on."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        return {name: getattr(self, name) for name in TENSOR_NAMES}

    def map(self, function) -> "OVQState":
        """The state with ``function`` applied to each tensor."""
        return replace(self, **{name: function(t) for name, t in self.tensors().items()})

    def select_rows(self, rows: Int[Tensor, " S"]) -> "OVQState":
        """The state with its rows picked, and repeated, by index, as beam search needs it."""
        return self.map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def detach(self) -> "OVQState":
        """The same numbers, cut from the autograd graph."""
        return self.map(lambda tensor: tensor.detach())

    def to(self, device: torch.device | str) -> "OVQState":
        """The same state on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def save(self, path: str | PathLike) -> None:
        """Write the state as a safetensors file, beside ``path`` first, then renamed onto it.

        Raises:
            ValueError: ``path`` is a folder, or lies in none.
            ImportError: safetensors is not installed.
        """
        StateFile(states=(self,)).save(path)

    @classmethod
    def load(cls, path: str | PathLike, device: torch.device | str = "cpu") -> "OVQState":
        """Read a state that :meth:`save` wrote.

        Raises:
            ValueError: the file is truncated, altered, of another kind or version, or its tensors
                do not fit one another.
            ImportError: safetensors is not installed.
            OSError: there is no such file.
        """
        states = StateFile.load(path, (OVQState, DictionaryConfig)).states
        if len(states) != 1 or not isinstance(states[0], cls):
            raise ValueError(f"path must be a file that OVQState.save wrote, got {path}")
        state = states[0].to(device)
        broken = broken_shape(state) or broken_bound(state) or _broken_number(state)
        if broken is not None:
            rule, found = broken
            raise ValueError(f"path must hold {rule}, got {found} in the damaged state {path}")
        return state


def broken_shape(state: OVQState) -> tuple[str, str] | None:
    """The first rule that the shapes, dtypes and devices break, and what there is instead."""
    keys, values = state.key_means, state.value_means
    R, G, K, V = (*keys.shape[:2], keys.shape[-1], values.shape[-1]) if keys.ndim == 4 else [0] * 4
    made = OVQState.empty(R, G, K, V, dictionary=state.dictionary, dtype=keys.dtype, device="meta")
    for (name, tensor), wanted in zip(
        state.tensors().items(), made.tensors().values(), strict=True
    ):
        if (tensor.shape, tensor.dtype, tensor.device) != (wanted.shape, wanted.dtype, keys.device):
            rule = f"{name} of {list(wanted.shape)} {wanted.dtype} on {keys.device}"
            return rule, f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
    return None


def broken_bound(state: OVQState) -> tuple[str, str] | None:
    """The first bound that the numbers of slots and tokens break, and what there is instead.

    These say where in memory the rest lies: out of their bounds they must reach no implementation.
    """
    d = state.dictionary
    N, C, W, L = d.num_centroids, d.chunk_size, d.window_size, d.tail_size
    numbers = (state.num_active, state.tail_length, state.num_absorbed)
    active, tail, absorbed = torch.stack(numbers).tolist()
    for rule, held, kept in (
        (f"num_active within [0, {N}]", active, all(0 <= n <= N for n in active)),
        (f"tail_length within [0, {L})", tail, all(0 <= n < L for n in tail)),
        (
            f"num_absorbed of whole chunks of {C}",
            absorbed,
            all(n >= 0 and n % C == 0 for n in absorbed),
        ),
        (
            f"tail_length of at least {W} once tokens are absorbed",
            tail,
            all(n == 0 or length >= W for n, length in zip(absorbed, tail, strict=True)),
        ),
    ):
        if not kept:
            return rule, str(held)
    return None


def _broken_number(state: OVQState) -> tuple[str, str] | None:
    """The first rule of a whole state that the others leave out and that a damaged file breaks."""
    counts = state.counts.cpu()
    in_use = torch.arange(counts.shape[-1]) < state.num_active.cpu()[:, None, None]
    absorbed = state.num_absorbed.cpu()[:, None]
    rules = {
        "counts of at least 1 in active slots and 0 elsewhere": ((counts > 0) == in_use).all(),
        "counts that add up to num_absorbed": (counts.sum(-1) == absorbed).all(),
        "finite numbers": all(t.isfinite().all() for t in state.tensors().values()),
    }
    return next(((rule, "others") for rule, kept in rules.items() if not kept), None)


class Slots(NamedTuple):
    """The slot that each token joined, -1 where it is not absorbed yet.

    Attributes:
        tail: of the tokens that came in with the state, ``[R, L, G]`` int64.
        tokens: of the tokens of the call, ``[B, T, G]`` int64.
    """

    tail: Int[Tensor, "R L G"]
    tokens: Int[Tensor, "B T G"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the state is kept and the softmax taken for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
