"""What single layers promise beyond the contract, the registry, and their bad inputs."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ovq.layers import MIXERS, FullAttention, OVQAttention, SlidingWindowAttention, build_mixer
from ovq.layers.registry import WITH_SHORT_CONV, check_short_conv
from ovq.layers.short_conv import ShortConvolution
from ovq.ops.ovq_attention import DictionaryConfig, ovq_attention


@pytest.fixture
def ovq(config) -> OVQAttention:
    torch.manual_seed(0)
    return build_mixer("ovq", config, layer_idx=0)


def test_ovq_layer_is_the_operator_between_projections(ovq):
    x = torch.randn(2, 11, 32)
    q, k, v = (p(x).view(2, 11, -1, 8) for p in (ovq.q_proj, ovq.k_proj, ovq.v_proj))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    o, _ = ovq_attention(q, k, v, 8.0, dictionary=ovq.dictionary)
    torch.testing.assert_close(ovq(x)[0], ovq.o_proj(o.flatten(2)))


def test_beta_starts_at_eight_in_float32(ovq):
    torch.testing.assert_close(ovq.beta, torch.full((4,), 8.0))
    assert ovq.to(torch.bfloat16).beta.dtype == torch.float32


@pytest.mark.parametrize("name", ["ovq", "vq"])
def test_beta_starts_where_it_is_told_to(name, config):
    config.initial_beta = 16.5
    torch.testing.assert_close(build_mixer(name, config, 0).beta, torch.full((4,), 16.5))
    config.initial_beta = -1.0
    with pytest.raises(ValueError, match="initial_beta must be finite and above 0, got -1"):
        build_mixer(name, config, 0)


@pytest.mark.parametrize(("name", "lowest"), [("gated_delta_net", 0.0), ("mamba2", 1 / 16)])
def test_rates_start_where_they_are_told_to(name, lowest, config):
    config.initial_decay_rate = 0.5
    starts = [build_mixer(name, config, 0).A_log.exp() for _ in range(50)]
    rates = torch.stack(starts)
    assert 0.5 * lowest < rates.min() < 0.5 * lowest + 0.05
    assert 0.45 < rates.max() < 0.5001
    config.initial_decay_rate = -1.0
    with pytest.raises(ValueError, match="initial_decay_rate must be finite and above 0, got -1"):
        build_mixer(name, config, 0)


def test_another_dictionary_on_the_same_weights(ovq, config):
    x = torch.randn(2, 40, 32)
    small, state = ovq(x)
    size = ovq.state_size(40)
    every_token = DictionaryConfig(num_centroids=64, chunk_size=4, growth="immediate")
    ovq.set_dictionary(every_token)
    assert ovq.state_size(40) > size
    exact, after = ovq(x)
    assert after.num_bytes == 2 * ovq.state_size(40)
    assert not torch.allclose(exact, small)
    q, k, v = (ovq.split_heads(p) for p in ovq.project(x, None))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    o = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=8.0, enable_gqa=True
    )
    torch.testing.assert_close(exact, ovq.merge_heads(o.transpose(1, 2)), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="state must"):
        ovq(x, state)


def test_short_convolution_equals_torchs():
    torch.manual_seed(0)
    convolution = ShortConvolution(6)
    x = torch.randn(2, 9, 6)
    y, past = convolution(x, convolution.init_state(2))
    padded = F.pad(x.transpose(1, 2), (3, 0))
    expected = F.conv1d(padded, convolution.weight.T[:, None], groups=6)
    torch.testing.assert_close(y, F.silu(expected).transpose(1, 2))
    assert past.equal(x[:, -3:])


def test_short_convolution_is_in_the_state(config):
    mixer = build_mixer("ovq", replace(config, use_short_conv=True), layer_idx=0)
    without = build_mixer("ovq", config, layer_idx=0)
    assert mixer.state_size(9) == without.state_size(9) + 3 * (4 + 2 + 2) * 8 * 4
    with pytest.raises(ValueError, match=r"convolution inputs \(1, 3, 64\).*got \(1, 0, 0\)"):
        mixer(torch.randn(1, 2, 32), without(torch.randn(1, 2, 32))[1])


@pytest.mark.parametrize("name", MIXERS)
def test_what_the_registry_tells_of_short_convolutions(name, config):
    mixer = build_mixer(name, replace(config, use_short_conv=True), layer_idx=0)
    has_one = any(isinstance(module, ShortConvolution) for module in mixer.modules())
    assert has_one == (name in WITH_SHORT_CONV)


def test_a_short_convolution_that_no_mixer_may_have_raises():
    check_short_conv(True, ["full_attention", "ovq"])
    check_short_conv(False, ["full_attention"])
    with pytest.raises(ValueError, match=r"'gated_delta_net'.*'vq'.* got \['full_attention'\]"):
        check_short_conv(True, ["full_attention"])


def test_an_unknown_mixer_lists_the_known(config):
    with pytest.raises(ValueError, match=r"name must be one of \['full_attention', .*got 'mamba9'"):
        build_mixer("mamba9", config, 0)


def test_bad_sizes_raise():
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads 4, got 3"):
        FullAttention(32, 4, 3, 8, rope_theta=None)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        FullAttention(32, 4, 4, 0, rope_theta=None)
    with pytest.raises(ValueError, match="window_size must be at least 1, got 0"):
        SlidingWindowAttention(32, 4, 4, 8, window_size=0, rope_theta=1e4)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        ShortConvolution(4, width=0)


def test_hidden_states_of_another_width_raise(ovq):
    with pytest.raises(ValueError, match=r"must be \[B, T, 32\], got \(1, 3, 31\)"):
        ovq(torch.randn(1, 3, 31))


@pytest.mark.plain
def test_a_state_of_another_mixer_raises(ovq, config):
    state = build_mixer("full_attention", config, 0).init_state(1)
    with pytest.raises(ValueError, match="state must be of class OVQAttentionState, got KVState"):
        ovq(torch.randn(1, 3, 32), state)


def test_importing_layers_needs_torch_and_jaxtyping_only():
    code = (
        "import sys, ovq.layers\n"
        "extras = {'transformers', 'safetensors', 'accelerate', 'numpy.testing', 'triton'}\n"
        "assert not extras & set(sys.modules), extras & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
