"""What the model remembers: one mixer state a layer, in the form that ``generate()`` expects."""

from collections.abc import Sequence
from dataclasses import fields
from os import PathLike

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ovq.layers.base import MixerState
from ovq.models.state_file import Fingerprint, load_states, save_states

# The argument and output field that carry the state were renamed in transformers 5.24.
CACHE_FIELD = (
    "cache"
    if "cache" in {field.name for field in fields(CausalLMOutputWithPast)}
    else "past_key_values"
)


class OVQCache:
    """The states of all layers after some columns of a batch of token ids.

    A call of the model never changes the cache it is given; it returns another.

    Args:
        states: one mixer state a layer; none for the start of a sequence.
        num_columns: columns of token ids read so far, padding included: the length that
            ``generate()`` counts in. The tokens of each row, without padding, are in the states.

    Raises:
        ValueError: states of different batch sizes.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, states: Sequence[MixerState] = (), num_columns: int = 0):
        sizes = {state.num_rows for state in states}
        if len(sizes) > 1:
            raise ValueError(f"states must share one batch size, got {sorted(sizes)}")
        self.states = list(states)
        self.num_columns = num_columns

    def __len__(self) -> int:
        return len(self.states)

    @property
    def is_linear(self) -> list[bool]:
        """Of each layer, whether ``generate()`` must leave cutting off the known tokens to it."""
        return [False] * len(self.states)

    @property
    def num_rows(self) -> int:
        """Number of sequences; 0 before any token."""
        return self.states[0].num_rows if self.states else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all the tensors held."""
        return sum(state.num_bytes for state in self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of token ids read so far, the same for every layer."""
        return self.num_columns

    def select_rows(self, rows: Int[Tensor, " R"] | Sequence[int]) -> "OVQCache":
        """The cache with its rows picked, and repeated, by index."""
        rows = torch.as_tensor(rows)
        return OVQCache([state.select_rows(rows) for state in self.states], self.num_columns)

    def reorder_cache(self, beam_idx: Int[Tensor, " R"]) -> None:
        """Rearrange the rows in place, as beam search asks for."""
        self.states = [state.select_rows(beam_idx) for state in self.states]

    def detach(self) -> "OVQCache":
        """The same numbers, cut from the autograd graph."""
        return OVQCache([state.detach() for state in self.states], self.num_columns)

    def as_prefix(self) -> "OVQCache":
        """The same memory, its columns counted from here.

        With it ``generate()`` and the model are given new tokens alone, and a mask of these, not
        all that was read before: one that goes on after a book need not hold the book.

        Example:
            >>> from ovq.models import OVQConfig, OVQForCausalLM
            >>> config = OVQConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
            >>> model, book = OVQForCausalLM(config).eval(), torch.arange(60)[None]
            >>> memory = model(book, return_dict=False)[1]
            >>> options = {"max_new_tokens": 4, "do_sample": False}
            >>> question = torch.tensor([[1, 2, 3]])
            >>> new = model.generate(question, **{CACHE_FIELD: memory.as_prefix()}, **options)
            >>> whole = model.generate(torch.cat([book, question], dim=1), **options)
            >>> new[:, 3:].equal(whole[:, 63:])
            True
        """
        return OVQCache(self.states)

    def save(self, path: str | PathLike, *, model: PreTrainedModel) -> None:
        """Write the memory as a safetensors file, beside ``path`` first, then renamed onto it.

        Args:
            path: of the file.
            model: the one that made it, whose fingerprint goes into the file.

        Raises:
            ValueError: ``path`` is a folder, or lies in none; a cache before any token.
            OSError: the file cannot be written.
        """
        about = {"num_columns": self.num_columns}
        save_states(path, self.states, fingerprint=Fingerprint.of(model), about=about)

    @classmethod
    def load(cls, path: str | PathLike, *, model: PreTrainedModel) -> "OVQCache":
        """Read what :meth:`save` or ``ovq read`` wrote, onto the device of the model.

        Going on from it equals going on from the saved one, to the bit.

        Args:
            path: of the file.
            model: the one that made it.

        Raises:
            ValueError: the file is truncated, altered, no state file, of another version, or of
                another model: other weights, another configuration, another dictionary.
            OSError: there is no such file.
        """
        file = load_states(path, model=model)
        return cls(file.states, file.about.get("num_columns", 0))

    def check_fits(self, num_layers: int, batch_size: int) -> None:
        """Raise unless this is a cache of that many layers and rows, or an empty one.

        Raises:
            ValueError: another number of layers or rows.
        """
        if self.states and len(self.states) != num_layers:
            raise ValueError(
                f"cache must hold one state a layer, {num_layers} here, got {len(self.states)}"
            )
        if self.states and self.num_rows != batch_size:
            raise ValueError(
                f"cache must have one row a sequence, {batch_size} here, got {self.num_rows}"
            )


def one_cache(
    cache: OVQCache | None, past_key_values: OVQCache | None, num_layers: int, batch_size: int
) -> OVQCache:
    """The cache of a call under either of its names, an empty one if neither is given.

    transformers 5.24 renamed ``past_key_values`` to ``cache``; a model that knows only one of them
    silently generates without a past on the other side.

    Raises:
        ValueError: two different caches, one of another class, or one that does not fit.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values must be the same object, got two")
    given = cache if cache is not None else past_key_values
    if given is None:
        return OVQCache()
    if not isinstance(given, OVQCache):
        raise ValueError(f"cache must be an OVQCache, got {type(given).__name__}")
    given.check_fits(num_layers, batch_size)
    return given


def real_tokens(
    attention_mask: Tensor | None, batch_size: int, num_new: int, num_past: int
) -> Bool[Tensor, "B T"] | None:
    """Which of the new tokens are real, from a padding mask; ``None`` if all are.

    Args:
        attention_mask: ``[B, T]`` or, as ``generate()`` passes it, ``[B, num_past + T]``: 1 at
            tokens, 0 at padding. ``None`` for no padding.
        batch_size: ``B``.
        num_new: ``T``.
        num_past: columns read before.

    Returns:
        ``[B, T]`` bool, or ``None``.

    Raises:
        ValueError: a mask of another shape, or one with other values than 0 and 1.
    """
    if attention_mask is None:
        return None
    shapes = {(batch_size, num_new), (batch_size, num_past + num_new)}
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) not in shapes:
        got = getattr(attention_mask, "shape", type(attention_mask).__name__)
        got = tuple(got) if isinstance(got, torch.Size) else got
        raise ValueError(
            f"attention_mask must be a padding mask of shape "
            f"{' or '.join(map(str, sorted(shapes)))}, got {got}"
        )
    new = attention_mask[:, attention_mask.shape[1] - num_new :]
    real = new != 0
    if not torch.equal(real.to(new.dtype), new):
        raise ValueError(f"attention_mask must hold 0 and 1 alone, got {new.unique()[:4].tolist()}")
    return None if real.all() else real
