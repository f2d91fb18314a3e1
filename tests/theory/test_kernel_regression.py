"""Softmax attention as kernel regression: equal key norms, any query norms."""

import math

import pytest
import torch

from ovq.ops.attention import softmax_attention as attention_of_the_library
from ovq.theory import (
    gaussian_kernel_regression,
    softmax_attention,
    softmax_attention_is_kernel_regression,
    softmax_attention_is_weighted_kernel_regression,
)


def test_two_samples_by_hand():
    k, v = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[10.0], [20.0]]).double()
    # At 0.5 with bandwidth 2 the distances are 1/2, 3/2: exp(-1/16) and exp(-9/16).
    near, far = math.exp(-1 / 16), math.exp(-9 / 16)
    expected = torch.tensor([[(10 * near + 20 * far) / (near + far)]]).double()
    q = torch.tensor([[0.5]]).double()
    torch.testing.assert_close(gaussian_kernel_regression(q, k, v, 2.0), expected)
    # Attention with beta = log 2 at q = 1: weights 2^0 and 2^2.
    torch.testing.assert_close(
        softmax_attention(2 * q, k, v, math.log(2.0)), torch.tensor([[18.0]]).double()
    )


def test_attention_here_is_the_librarys(normal):
    q, k, v = normal(1, 5, 1, 4), normal(1, 5, 1, 4), normal(1, 5, 1, 3)
    theirs, _ = attention_of_the_library(q, k, v, scale=3.0)
    ours = softmax_attention(q[0, -1:, 0], k[0, :, 0], v[0, :, 0], 3.0)  # the last sees all keys
    torch.testing.assert_close(ours, theirs[0, -1:, 0])


@pytest.mark.parametrize("beta", [0.5, 8.0, 64.0])
@pytest.mark.parametrize("query_norm", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("key_norm", [1.0, 2.0])
def test_equal_key_norms_make_attention_kernel_regression(normal, unit, beta, query_norm, key_norm):
    q, k, v = query_norm * normal(6, 8), key_norm * unit(20, 8), normal(20, 3)
    assert softmax_attention_is_kernel_regression(q, k, v, beta).gap < 1e-11


def test_unequal_key_norms_do_not_but_for_the_weights(normal, unit):
    q, v = unit(6, 8), normal(20, 3)
    k = unit(20, 8) * torch.linspace(0.5, 2, 20).double()[:, None]
    assert softmax_attention_is_kernel_regression(q, k, v, 8.0).gap > 0.5
    assert softmax_attention_is_weighted_kernel_regression(q, k, v, 8.0).gap < 1e-11


def test_far_queries_are_no_zero_over_zero(normal, unit):
    q, k, v = 1e4 * unit(3, 4), unit(5, 4), normal(5, 2)
    nearest = (q @ k.mT).argmax(-1)
    torch.testing.assert_close(gaussian_kernel_regression(q, k, v, 1e-3), v[nearest])


@pytest.mark.parametrize("beta", [0.0, -1.0])
@pytest.mark.parametrize(
    "statement",
    [softmax_attention_is_kernel_regression, softmax_attention_is_weighted_kernel_regression],
)
def test_no_bandwidth_belongs_to_a_beta_of_zero_or_below(unit, statement, beta):
    with pytest.raises(ValueError, match=f"beta must be above 0, got {beta}"):
        statement(unit(1, 2), unit(3, 2), unit(3, 2), beta)


def test_a_bandwidth_of_zero_raises(unit):
    with pytest.raises(ValueError, match=r"bandwidth must be above 0, got 0\.0"):
        gaussian_kernel_regression(unit(1, 2), unit(3, 2), unit(3, 2), 0.0)
