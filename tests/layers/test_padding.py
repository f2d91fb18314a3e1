"""Padding anywhere, of any size, changes nothing: no output, no state, no gradient of a real token.

Over every mixer of the registry, each row against its own run without padding.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ovq.layers import MIXERS, Mixer, MixerState, build_mixer, without_padding
from ovq.ops.attention import KVState

B, T, D = 4, 19, 32
PAD_NORM = 1e4
CASES = [(name, {}) for name in MIXERS]
CASES += [("ovq", {"use_short_conv": True}), ("sliding_window", {"window_size": 1})]
CASES += [("linear_attention", {"use_short_conv": True}), ("vq", {"use_short_conv": True})]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def mixer(request, config) -> Mixer:
    name, changes = request.param
    torch.manual_seed(0)
    return build_mixer(name, replace(config, **changes), layer_idx=0)


def mask(side: str) -> Tensor:
    """Which tokens are real: rows of 19, 13, 5 and 5 tokens, or scattered; one row without any."""
    lengths, places = torch.tensor([T, 13, 5, 5]), torch.arange(T)
    if side == "right":
        return places < lengths[:, None]
    if side == "left":
        return places >= T - lengths[:, None]
    if side == "scattered":
        return torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.5
    return (places < T) & (torch.arange(B) % 2 == 0)[:, None]  # rows 1 and 3 are padding alone


def padded(real: Tensor, seed: int = 1) -> Tensor:
    """Normal hidden states, huge ones at padding."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*real.shape, D, generator=draw)
    return torch.where(real[..., None], x, PAD_NORM * x / x.norm(dim=-1, keepdim=True))


def run_one(mixer: Mixer):
    """The mixer in the form that ``without_padding`` runs."""

    def run(x: Tensor, states: Sequence[MixerState | None]) -> tuple[Tensor, list[MixerState]]:
        o, state = mixer(x, states[0])
        return o, [state]

    return run


def past_of_unlike_lengths(mixer: Mixer) -> MixerState:
    """A state whose rows have seen 0, 3, 4 and 9 tokens."""
    draw = torch.Generator().manual_seed(7)
    states = [mixer(torch.randn(1, n, D, generator=draw))[1] for n in (0, 3, 4, 9)]
    return type(states[0]).concat(states)


def held(state: MixerState, row: int) -> list[Tensor]:
    """What a row remembers, without what a batch adds to it."""
    own = state.select_rows(torch.tensor([row]))
    return tensors_in(own)


def tensors_in(state) -> list[Tensor]:
    """All tensors of a state of one row and of the states within it."""
    if isinstance(state, KVState):
        latest = state.held_by_row()[0]
        return [state.keys[0, latest], state.values[0, latest], state.num_tokens]
    found = []
    for value in (getattr(state, field.name) for field in fields(state)):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, MixerState):
            found.extend(tensors_in(value))
    assert found
    return found


@pytest.mark.parametrize("carried", [False, True], ids=["from the start", "from a state"])
@pytest.mark.parametrize("side", ["left", "right", "scattered", "whole rows"])
def test_each_row_equals_its_own_run(mixer, side, carried):
    real = mask(side)
    x, past = padded(real), past_of_unlike_lengths(mixer) if carried else None
    o, (state,) = without_padding(run_one(mixer), x, real, [past])
    assert o.shape == x.shape
    assert not o[~real].any()
    for row in range(B):
        own_past = None if past is None else past.select_rows(torch.tensor([row]))
        own, own_state = mixer(x[row : row + 1, real[row]], own_past)
        torch.testing.assert_close(o[row, real[row]], own[0], atol=1e-6, rtol=1e-5)
        for found, expected in zip(held(state, row), held(own_state, 0), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    before = 0 if past is None else past.num_tokens
    assert state.num_tokens.equal(before + real.sum(1))


@pytest.mark.parametrize("name", MIXERS)
def test_pads_left_in_place_would_change_the_outputs(config, name):
    """So that the tests above mean something."""
    mixer, real = build_mixer(name, config, layer_idx=0), mask("left")
    x = padded(real)
    o, _ = without_padding(run_one(mixer), x, real, [None])
    assert not torch.allclose(mixer(x)[0][real], o[real], atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right", "scattered", "whole rows"])
def test_counts_sum_to_the_real_tokens_absorbed(config, side):
    mixer, real = build_mixer("ovq", config, layer_idx=0), mask(side)
    _, (state,) = without_padding(run_one(mixer), padded(real), real, [None])
    chunk_size = config.dictionary["chunk_size"]
    absorbed = real.sum(1) // chunk_size * chunk_size
    assert absorbed.any()
    assert state.memory.num_absorbed.equal(absorbed)
    assert state.memory.counts.sum(-1).equal(absorbed[:, None].expand(-1, 2))
    assert state.memory.tail_length.equal(real.sum(1) - absorbed)


@pytest.mark.parametrize("side", ["left", "scattered"])
def test_gradients_of_real_tokens_are_their_own_and_pads_get_none(mixer, side):
    mixer, real = mixer.double(), mask(side)
    x = padded(real).double().requires_grad_()
    o, _ = without_padding(run_one(mixer), x, real, [None])
    (found,) = torch.autograd.grad((o * o.detach().cos()).sum(), [x])
    assert not found[~real].any()
    for row in range(B):
        own = x.detach()[row : row + 1, real[row]].requires_grad_()
        o_row, _ = mixer(own)
        (expected,) = torch.autograd.grad((o_row * o_row.detach().cos()).sum(), [own])
        torch.testing.assert_close(found[row, real[row]], expected[0], atol=1e-9, rtol=1e-9)
        assert expected.any() or not real[row].any()


def test_several_mixers_and_their_states_in_order(config):
    """As the model runs its layers; the incoming states stay as they were."""
    torch.manual_seed(0)
    mixers = [build_mixer(name, config, layer_idx=i) for i, name in enumerate(MIXERS)]
    real = mask("scattered")

    def run(x, states):
        after = []
        for mixer, state in zip(mixers, states, strict=True):
            x, state = mixer(x, state)
            after.append(state)
        return x, after

    x, past = padded(real), [past_of_unlike_lengths(mixer) for mixer in mixers]
    before = [[tensor.clone() for row in range(B) for tensor in held(s, row)] for s in past]
    o, after = without_padding(run, x, real, past)
    assert [type(state) for state in after] == [type(state) for state in past]
    for row in range(B):
        own, own_states = run(
            x[row : row + 1, real[row]], [s.select_rows(torch.tensor([row])) for s in past]
        )
        torch.testing.assert_close(o[row, real[row]], own[0], atol=1e-5, rtol=1e-5)
        for state, own_state in zip(after, own_states, strict=True):
            for found, expected in zip(held(state, row), held(own_state, 0), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for tensors, state in zip(before, past, strict=True):
        now = [tensor for row in range(B) for tensor in held(state, row)]
        assert all(a.equal(b) for a, b in zip(tensors, now, strict=True))


def test_the_output_keeps_the_dtype_of_the_input(config):
    mixer, real = build_mixer("ovq", config, layer_idx=0).to(torch.bfloat16), mask("left")
    o, _ = without_padding(run_one(mixer), padded(real).to(torch.bfloat16), real, [None])
    assert o.dtype == torch.bfloat16
    assert o.isfinite().all()
