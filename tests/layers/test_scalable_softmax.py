"""Scalable softmax: which mixers have it, that it is plain where it should be, cut anywhere."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ovq.layers import MIXERS, FullAttention, build_mixer
from ovq.layers.registry import WITH_SSMAX, check_ssmax
from ovq.layers.scalable_softmax import scale_queries


def make(name, config, length):
    torch.manual_seed(0)
    return build_mixer(name, replace(config, ssmax_length=length), 0).double().eval()


@pytest.mark.parametrize("name", MIXERS)
def test_what_the_registry_tells_of_scalable_softmax(name, config):
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    plain, scaled = make(name, config, None)(x)[0], make(name, config, 4)(x)[0]
    assert torch.allclose(plain, scaled) == (name not in WITH_SSMAX)


@pytest.mark.parametrize("name", sorted(WITH_SSMAX))
def test_it_is_plain_for_queries_that_see_its_length(name, config):
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    plain = make(name, config, None)(x)[0]
    for length in range(2, 14):
        scaled = make(name, config, length)(x)[0]
        torch.testing.assert_close(scaled[:, length - 1], plain[:, length - 1])


@pytest.mark.parametrize("name", sorted(WITH_SSMAX))
@pytest.mark.parametrize("cut", [1, 6])
def test_queries_are_counted_from_the_start_of_their_row(name, cut, config):
    mixer = make(name, config, 5)
    x = torch.randn(1, 13, 32, dtype=torch.float64)
    whole = mixer(x)[0]
    state = mixer(x[:, :cut])[1]
    other = mixer(torch.randn(1, 9, 32, dtype=torch.float64))[1]
    rows = type(state).concat([state, other])  # of different numbers of tokens
    after = mixer(x[:, cut:].expand(2, -1, -1), rows)[0]
    torch.testing.assert_close(after[:1], whole[:, cut:])
    alone = mixer(x[:, cut:], other)[0]
    torch.testing.assert_close(after[1:], alone)


def test_it_is_a_softmax_of_logits_that_grow_with_the_logarithm():
    torch.manual_seed(0)
    layer = FullAttention(8, 1, 1, 8, rope_theta=None, ssmax_length=16)
    x = torch.randn(1, 40, 8)
    q, k, v = (p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    seen = torch.arange(1, 41)
    logits = q @ k.mT / 8**0.5 * (seen.log() / torch.tensor(16.0).log())[:, None]
    later = seen > seen[:, None]
    weights = F.softmax(logits.masked_fill(later, -torch.inf), dim=-1)
    torch.testing.assert_close(layer(x)[0], layer.o_proj(weights @ v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scaled_queries_keep_their_dtype(dtype):
    q = torch.randn(1, 9, 2, 4, dtype=dtype)
    assert scale_queries(q, None, 9).dtype == dtype
    assert scale_queries(q, None, 9)[:, 8].equal(q[:, 8])
    assert scale_queries(q, None, None) is q


def test_a_length_that_no_mixer_may_have_raises():
    check_ssmax(128, ["mamba2", "ovq"])
    check_ssmax(None, ["mamba2"])
    with pytest.raises(ValueError, match=r"must be none unless .*'ovq'.* got \['mamba2'\]"):
        check_ssmax(128, ["mamba2"])
    with pytest.raises(ValueError, match=r"ssmax_length must be an integer of at least 2.* got 1"):
        check_ssmax(1, ["ovq"])
    with pytest.raises(ValueError, match=r"ssmax_length must be an integer of at least 2.* got 0"):
        FullAttention(8, 1, 1, 8, rope_theta=None, ssmax_length=0)
