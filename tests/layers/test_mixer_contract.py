"""What holds for every mixer, over the whole registry and its options."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ovq.layers import MIXERS, MesaNet, Mixer, VQAttention, build_mixer
from ovq.layers.registry import WITH_SSMAX
from ovq.ops.attention import KVState

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 11, 29)


class RunningMean(Mixer):
    """The simplest mixer there is: each token becomes the mean of all tokens up to it.

    It borrows the state of attention: one key, the sum so far.
    """

    def __init__(self, hidden_size: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))

    @classmethod
    def from_config(cls, config, layer_idx):
        return cls(config.hidden_size)

    def forward(self, hidden_states, state=None):
        state = self.init_state(len(hidden_states)) if state is None else state
        sums = state.keys[:, :, 0].to(hidden_states.dtype) + hidden_states.cumsum(1)
        seen = state.num_tokens[:, None] + torch.arange(1, hidden_states.shape[1] + 1)
        last = torch.cat([state.keys[:, :, 0].to(sums.dtype), sums], dim=1)[:, -1:, None]
        after = replace(
            state, keys=last, values=last, num_tokens=state.num_tokens + hidden_states.shape[1]
        )
        return sums / seen[..., None].to(sums.dtype) * self.scale, after

    def init_state(self, batch_size):
        zeros = self.scale.new_zeros(batch_size, 1, 1, len(self.scale))
        return KVState(keys=zeros, values=zeros, num_tokens=torch.zeros(batch_size).long())

    def state_size(self, num_tokens):
        return 2 * len(self.scale) * self.scale.element_size() + 8


CASES = [(name, {}) for name in MIXERS]
CASES += [("toy", {}), ("ovq", {"use_short_conv": True}), ("sliding_window", {"window_size": 1})]
CASES += [("linear_attention", {"use_short_conv": True}), ("gated_delta_net", {"expand_v": 1.5})]
CASES += [("vq", {"use_short_conv": True})]
CASES += [(name, {"ssmax_length": 4}) for name in sorted(WITH_SSMAX)]


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *case[1]]))
def mixer(request, config, monkeypatch) -> Mixer:
    name, changes = request.param
    monkeypatch.setitem(MIXERS, "toy", RunningMean.from_config)
    torch.manual_seed(0)
    return build_mixer(name, replace(config, **changes), layer_idx=0)


def hidden(num_tokens: int, batch_size: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, num_tokens, 32, generator=generator)


def in_pieces(mixer: Mixer, x: Tensor, cuts, state=None):
    outputs = []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        o, state = mixer(x[:, start:stop], state)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_shapes_tokens_and_bytes(mixer, num_tokens):
    o, state = mixer(hidden(num_tokens))
    assert o.shape == (2, num_tokens, 32)
    assert o.isfinite().all()
    assert state.num_rows == 2
    assert state.num_tokens.tolist() == [num_tokens] * 2
    assert state.num_bytes == 2 * mixer.state_size(num_tokens)
    if num_tokens == 0:
        assert state.num_bytes == mixer.init_state(2).num_bytes


@pytest.mark.parametrize("cuts", [[1], [3, 4], [5, 5, 17], [4, 8, 12], list(range(1, 29))])
def test_any_split_equals_one_call(mixer, cuts):
    """The last split is decoding token by token."""
    x = hidden(29)
    whole, whole_state = mixer(x)
    parts, parts_state = in_pieces(mixer, x, cuts)
    # MesaNet's norm magnifies the rounding of an output near zero, with no gate behind it.
    scale = 10 if isinstance(mixer, MesaNet) else 1
    torch.testing.assert_close(parts, whole, atol=scale * 1e-6, rtol=scale * 1e-5)
    assert parts_state.num_tokens.equal(whole_state.num_tokens)
    after = [mixer(hidden(7, seed=2), state)[0] for state in (parts_state, whole_state)]
    torch.testing.assert_close(*after, atol=1e-6, rtol=1e-5)


def test_initial_state_equals_none(mixer):
    x = hidden(9)
    after_nothing = mixer(x, mixer.init_state(2))[0]
    torch.testing.assert_close(after_nothing, mixer(x)[0], atol=1e-6, rtol=1e-5)


def test_outputs_ignore_later_tokens_and_use_earlier_ones(mixer):
    x = hidden(13)
    changed = x.clone()
    changed[:, 7:] = 1e3 * hidden(6, seed=3)
    before, after = mixer(x)[0], mixer(changed)[0]
    torch.testing.assert_close(after[:, :7], before[:, :7], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(after[:, 7:], before[:, 7:])
    if getattr(mixer, "window_size", None) == 1:
        return  # sees itself alone
    first = x.clone()
    first[:, 3] += 1.0
    assert not torch.allclose(mixer(first)[0][:, 4], before[:, 4])


def test_rows_are_independent(mixer):
    x = hidden(13, batch_size=3)
    together, state = mixer(x)
    alone = torch.cat([mixer(row)[0] for row in x.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    rows = torch.tensor([2, 0, 0])
    more = hidden(6, batch_size=3, seed=4)
    picked = mixer(more[rows], state.select_rows(rows))[0]
    torch.testing.assert_close(picked, mixer(more, state)[0][rows], atol=1e-6, rtol=1e-5)


def test_concatenated_states_of_unequal_lengths(mixer):
    """Rows with other pasts go on together as each would alone."""
    lengths = (0, 2, 3, 9)
    pasts = [mixer(hidden(n, 1, seed=n))[1] for n in lengths]
    x = hidden(11, batch_size=4, seed=5)
    joined = type(pasts[0]).concat(pasts)
    assert joined.num_tokens.tolist() == list(lengths)
    together, state = in_pieces(mixer, x, [1, 2, 8], joined)
    alone = torch.cat([mixer(x[i : i + 1], past)[0] for i, past in enumerate(pasts)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    assert state.num_tokens.tolist() == [n + 11 for n in lengths]


def test_gradients_reach_all_parameters_and_the_state(mixer):
    first, second = hidden(6).requires_grad_(), hidden(6, seed=2)
    o, _ = mixer(second, mixer(first)[1])
    o.square().sum().backward()
    sees_itself_alone = getattr(mixer, "window_size", None) == 1
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # The softmax of one logit is 1, whatever the logit.
        if not (sees_itself_alone and name in ("q_proj.weight", "k_proj.weight")):
            assert parameter.grad.abs().sum() > 0, name
    if not sees_itself_alone:
        assert first.grad.abs().sum() > 0


def test_gradients_of_a_split_equal_those_of_one_call(mixer):
    mixer, x = mixer.double(), hidden(11).double()

    def gradients(cuts):
        leaf = x.clone().requires_grad_()
        o, _ = in_pieces(mixer, leaf, cuts)
        inputs = [leaf, *mixer.parameters()]
        return torch.autograd.grad((o * x.cos()).sum(), inputs)

    for split, whole in zip(gradients([2, 3, 9]), gradients([]), strict=True):
        torch.testing.assert_close(split, whole, atol=1e-9, rtol=1e-9)


def test_incoming_state_is_untouched_and_detached_states_hold_no_graph(mixer):
    _, state = mixer(hidden(6))
    continued = mixer(hidden(9, seed=2), state)[0]
    torch.testing.assert_close(mixer(hidden(9, seed=2), state)[0], continued, atol=0, rtol=0)
    for _ in range(2):  # a stale graph would fail the second backward
        o, state = mixer(hidden(6), state.detach())
        o.sum().backward()


def test_forward_changes_no_parameter_and_repeats_bitwise(mixer):
    before = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    x = hidden(13)
    first, second = mixer(x)[0], mixer(x)[0]
    assert first.equal(second)
    assert mixer.eval()(x)[0].equal(first)
    for name, tensor in mixer.state_dict().items():
        assert tensor.equal(before[name]), name


def test_bfloat16_in_bfloat16_out(mixer):
    x = hidden(5)
    exact = mixer(x)[0]
    mixer.to(torch.bfloat16)
    rounded, state = mixer(x.to(torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert state.num_bytes == 2 * mixer.state_size(5)
    rounded, _ = in_pieces(mixer, x.to(torch.bfloat16), [2])
    errors = (rounded.float() - exact).square().mean(-1)
    # Where a vector lies between two codes, rounding may decide for the other.
    error = errors.median() if isinstance(mixer, VQAttention) else errors.mean()
    assert error < 1e-3 * exact.square().mean()


def test_autocast_runs_with_a_carried_state(mixer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = mixer(hidden(6))
        o, _ = mixer(hidden(3), state)
    assert o.isfinite().all()


def test_state_moves_between_devices(mixer):
    _, state = mixer(hidden(6))
    assert state.to("meta").num_bytes == state.num_bytes
    assert state.to("cpu").num_tokens.equal(state.num_tokens)


def test_states_that_do_not_fit_raise(mixer, config):
    if isinstance(mixer, RunningMean):
        pytest.skip("the toy of this file does not check")
    _, state = mixer(hidden(6))
    with pytest.raises(ValueError, match=r"state must .*3.*2"):
        mixer(hidden(6, batch_size=3), state)
    with pytest.raises(ValueError, match=r"state must be on cpu as .* on meta"):
        mixer(hidden(6), state.to("meta"))
    with pytest.raises(ValueError, match=r"states must .*(got \[\]|got none)"):
        type(state).concat([])
