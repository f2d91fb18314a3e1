"""The linear maps around an attention-like mixer: queries, keys, values in; heads merged out."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import Mixer, MixerState


class ProjectedMixer(Mixer):
    """A mixer over heads, between linear projections. Abstract: a subclass says how tokens mix.

    Args:
        hidden_size: ``D``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``, which divides ``H``.
        head_dim: ``K = V``.

    Raises:
        ValueError: a size below 1, or ``G`` not dividing ``H``.
    """

    state_class: ClassVar[type]

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        sizes = {
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def project(
        self, hidden_states: Float[Tensor, "B T D"], state: MixerState | None
    ) -> tuple[Float[Tensor, "B T HK"], Float[Tensor, "B T GK"], Float[Tensor, "B T GV"]]:
        """Queries, keys and values, heads side by side.

        Raises:
            ValueError: hidden states that are not ``[B, T, hidden_size]``, or a state of another
                kind or batch size.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must be [B, T, {self.hidden_size}], "
                f"got {tuple(hidden_states.shape)}"
            )
        if state is not None and not isinstance(state, self.state_class):
            raise ValueError(
                f"state must be of class {self.state_class.__name__}, got {type(state).__name__}"
            )
        if state is not None and state.num_rows != hidden_states.shape[0]:
            raise ValueError(
                f"state must have one row a sequence, {hidden_states.shape[0]} here, "
                f"got {state.num_rows}"
            )
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def split_heads(self, x: Float[Tensor, "B T F"]) -> Float[Tensor, "B T H K"]:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return x.unflatten(-1, (-1, self.head_dim))

    def merge_heads(self, o: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
        """The output projection of all heads, ``[B, T, H, V]`` to ``[B, T, D]``."""
        return self.o_proj(o.flatten(2))
