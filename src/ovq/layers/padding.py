"""Padding is removed before the mixers see a batch, and never masked: it cannot enter a state."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ovq.layers.base import MixerState

States = Sequence[MixerState | None]


def without_padding(
    run: Callable[[Tensor, States], tuple[Tensor, Sequence[MixerState]]],
    hidden_states: Float[Tensor, "B T D"],
    real: Bool[Tensor, "B T"],
    states: States,
) -> tuple[Float[Tensor, "B T D"], list[MixerState]]:
    """What ``run`` makes of the real tokens of each row, as if there were no padding between them.

    Rows with equally many real tokens run together, so ``run`` is called once for each such number;
    a row of padding alone keeps its state. Pads may stand anywhere.

    Args:
        run: one or more mixers: from hidden states ``[R, L, D]`` and states of ``R`` rows to hidden
            states ``[R, L, D]`` and as many states.
        hidden_states: ``[B, T, D]`` with at least one row; what pads hold is never read.
        real: ``[B, T]``, false at padding.
        states: what came before, ``None`` for the start of a sequence; none is changed.

    Returns:
        The output ``[B, T, D]`` in the input's dtype, zero at padding, and the states after the
        last real token of each row, rows in their order.

    Example:
        >>> from ovq.layers import FullAttention
        >>> layer = FullAttention(16, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=10000.0)
        >>> def run(x, states):
        ...     o, state = layer(x, states[0])
        ...     return o, [state]
        >>> real = torch.tensor([[False, True, True], [True, True, True]])
        >>> output, (state,) = without_padding(run, torch.randn(2, 3, 16), real, [None])
        >>> output[0, 0].abs().max().item(), state.num_tokens.tolist()
        (0.0, [2, 3])
    """
    lengths = real.sum(1)
    outputs = hidden_states.new_zeros(hidden_states.shape)
    order, parts = [], []
    for length in lengths.unique().tolist():
        chosen = lengths == length
        rows = chosen.nonzero()[:, 0]
        places = (real & chosen[:, None]).nonzero(as_tuple=True)
        own = [None if state is None else state.select_rows(rows) for state in states]
        order.append(rows)
        if length == 0 and all(state is not None for state in own):
            parts.append(own)
            continue
        packed = hidden_states[places].view(len(rows), length, hidden_states.shape[-1])
        mixed, after = run(packed, own)
        outputs[places] = mixed.flatten(0, 1).to(outputs.dtype)
        parts.append(after)
    back = torch.cat(order).argsort()
    merged = [type(same[0]).concat(same).select_rows(back) for same in zip(*parts, strict=True)]
    return outputs, merged
