"""What OVQ attention remembers: two dictionaries, their counts, and the unfinished chunk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from os import replace as rename
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ovq.ops.ovq_attention.dictionary import DictionaryConfig

FORMAT = "ovq-state"
FORMAT_VERSION = 1
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
        tail_keys: ``[R, C, G, K]``, the keys of the unfinished chunk, zero past ``tail_length``.
        tail_values: ``[R, C, G, V]``.
        tail_length: ``[R]`` int64, below ``C``.
        dictionary: the configuration it was made with.
    """

    key_means: Float[Tensor, "R G N K"]
    value_means: Float[Tensor, "R G N V"]
    counts: Int[Tensor, "R G N"]
    num_active: Int[Tensor, " R"]
    num_absorbed: Int[Tensor, " R"]
    tail_keys: Float[Tensor, "R C G K"]
    tail_values: Float[Tensor, "R C G V"]
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
        R, G, N, C = num_rows, num_kv_heads, dictionary.num_centroids, dictionary.chunk_size
        real = {"dtype": working_dtype(dtype), "device": device}
        whole = {"dtype": torch.int64, "device": device}
        return cls(
            key_means=torch.zeros(R, G, N, key_dim, **real),
            value_means=torch.zeros(R, G, N, value_dim, **real),
            counts=torch.zeros(R, G, N, **whole),
            num_active=torch.zeros(R, **whole),
            num_absorbed=torch.zeros(R, **whole),
            tail_keys=torch.zeros(R, C, G, key_dim, **real),
            tail_values=torch.zeros(R, C, G, value_dim, **real),
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
        """Tokens seen by each row, absorbed or in the unfinished chunk, ``[R]`` int64."""
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
        """Write the state as a safetensors file, beside ``path`` first, then renamed onto it."""
        from safetensors.torch import save_file

        metadata = {
            "format": FORMAT,
            "version": str(FORMAT_VERSION),
            "dictionary": json.dumps(asdict(self.dictionary)),
        }
        tensors = {name: t.detach().contiguous() for name, t in self.tensors().items()}
        beside = f"{path}.partial"
        save_file(tensors, beside, metadata=metadata)
        rename(beside, path)

    @classmethod
    def load(cls, path: str | PathLike, device: torch.device | str = "cpu") -> "OVQState":
        """Read a state that :meth:`save` wrote.

        Raises:
            ValueError: the file is truncated, of another kind, of a newer version, or its tensors
                do not fit one another.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        except SafetensorError as error:
            raise ValueError(
                f"path must be a whole safetensors file, got {path}: {error}"
            ) from None
        if metadata.get("format") != FORMAT:
            raise ValueError(f"path must be a file that OVQState.save wrote, got {path}")
        version = metadata.get("version", "")
        if not version.isdecimal() or int(version) > FORMAT_VERSION:
            raise ValueError(
                f"path must be of format version {FORMAT_VERSION} or older, got version "
                f"{version!r} in {path}; update ovq"
            )
        try:
            dictionary = DictionaryConfig(**json.loads(metadata.get("dictionary", "")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"path must hold a whole dictionary, got {path}: {error}") from None
        if set(tensors) != set(TENSOR_NAMES):
            raise ValueError(f"path must hold the tensors {TENSOR_NAMES}, got {path}")
        _check_shapes(tensors, dictionary, path)
        _check_numbers(tensors, dictionary, path)
        return cls(dictionary=dictionary, **tensors)


def _check_shapes(
    tensors: dict[str, Tensor], dictionary: DictionaryConfig, path: str | PathLike
) -> None:
    keys, values = tensors["key_means"], tensors["value_means"]
    R, G, K, V = (*keys.shape[:2], keys.shape[-1], values.shape[-1]) if keys.ndim == 4 else [0] * 4
    made = OVQState.empty(R, G, K, V, dictionary=dictionary, dtype=keys.dtype, device="meta")
    for name, wanted in made.tensors().items():
        tensor = tensors[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ValueError(
                f"path must hold {name} of {tuple(wanted.shape)} {wanted.dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype} in {path}"
            )


def _check_numbers(
    tensors: dict[str, Tensor], dictionary: DictionaryConfig, path: str | PathLike
) -> None:
    """What every state fulfils, so that a damaged file cannot reach a kernel's memory."""
    N, C = dictionary.num_centroids, dictionary.chunk_size
    active, tail = tensors["num_active"], tensors["tail_length"]
    in_use = torch.arange(N) < active.cpu()[:, None, None]
    absorbed = tensors["num_absorbed"].cpu()[:, None]
    counts = tensors["counts"].cpu()
    rules = {
        "num_active within [0, N]": ((active >= 0) & (active <= N)).all(),
        "tail_length within [0, C)": ((tail >= 0) & (tail < C)).all(),
        "counts of at least 1 in active slots and 0 elsewhere": ((counts > 0) == in_use).all(),
        "counts that add up to num_absorbed": (counts.sum(-1) == absorbed).all(),
        "finite numbers": all(t.isfinite().all() for t in tensors.values()),
    }
    for rule, kept in rules.items():
        if not kept:
            raise ValueError(f"path must hold {rule}, got a damaged state in {path}")


class Slots(NamedTuple):
    """The slot that each token joined, -1 where it waits in the unfinished chunk.

    Attributes:
        tail: of the tokens that came in with the state, ``[R, C, G]`` int64.
        tokens: of the tokens of the call, ``[B, T, G]`` int64.
    """

    tail: Int[Tensor, "R C G"]
    tokens: Int[Tensor, "B T G"]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the state is kept and the softmax taken for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
