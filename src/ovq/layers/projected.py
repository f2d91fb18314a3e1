"""The linear maps around an attention-like mixer: queries, keys, values in; heads merged out."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ovq.layers.base import Mixer, MixerState, check_hidden_states, check_sizes, check_state


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
        check_sizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
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
                kind, batch size or device.
        """
        check_hidden_states(hidden_states, self.hidden_size)
        if state is not None:
            check_state(state, self.state_class, hidden_states)
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def split_heads(self, x: Float[Tensor, "B T F"]) -> Float[Tensor, "B T H K"]:
        """``[B, T, H * K]`` to ``[B, T, H, K]``."""
        return x.unflatten(-1, (-1, self.head_dim))

    def merge_heads(self, o: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
        """The output projection of all heads, ``[B, T, H, V]`` to ``[B, T, D]``."""
        return self.o_proj(o.flatten(2))
