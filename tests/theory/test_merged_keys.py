"""Reads of merged keys: exact without spread, too low with it, right to second order."""

import pytest
import torch

from ovq import DictionaryConfig, ovq_attention
from ovq.theory import (
    dictionary_read_is_softmax_attention,
    exact_weight_is_above_merged_weight,
    exact_weight_is_second_order_weight,
    key_covariance,
    softmax_attention,
    trace_of_covariance_is_one_minus_squared_norm,
)


def test_every_token_its_own_slot_is_attention(normal, unit):
    q, k, v = unit(5, 4), unit(12, 4), normal(12, 3)
    slots = torch.arange(12).flip(0)  # in any order
    assert dictionary_read_is_softmax_attention(q, k, v, slots, 12, 8.0).gap < 1e-12


def test_so_it_is_for_the_operator(normal, unit):
    """Slots for all tokens, opened at once: the operator is causal softmax attention."""
    q, k, v = unit(12, 4), unit(12, 4), normal(12, 3)
    dictionary = DictionaryConfig(num_centroids=12, chunk_size=3, growth="immediate")
    o, _ = ovq_attention(
        *(x[None, :, None] for x in (q, k, v)), 8.0, dictionary=dictionary, impl="reference"
    )
    expected = [softmax_attention(q[i, None], k[: i + 1], v[: i + 1], 8.0) for i in range(12)]
    torch.testing.assert_close(o[0, :, 0], torch.cat(expected))


def test_repeated_keys_may_share_a_slot_whatever_their_values(normal, unit):
    slots = torch.tensor([0, 2, 1, 1, 0, 1])
    q, k, v = unit(5, 4), unit(3, 4)[slots], normal(6, 3)
    assert dictionary_read_is_softmax_attention(q, k, v, slots, 3, 8.0).gap < 1e-12


def test_keys_that_differ_may_not(normal, unit):
    slots = torch.tensor([0, 2, 1, 1, 0, 1])
    q, k, v = unit(5, 4), unit(6, 4), normal(6, 3)
    assert dictionary_read_is_softmax_attention(q, k, v, slots, 3, 8.0).gap > 0.3


@pytest.mark.parametrize("beta", [0.5, 8.0])
def test_merging_never_overrates_a_slot(normal, beta):
    sides = exact_weight_is_above_merged_weight(normal(50, 4), normal(6, 4), beta)
    assert (sides.left - sides.right).min() > 0
    assert sides.gap > 0.5


def test_it_is_exact_without_spread_along_the_query(normal):
    q, keys = normal(5, 4), normal(1, 4).expand(6, 4)
    assert exact_weight_is_above_merged_weight(q, keys, 8.0).gap < 1e-12
    across = torch.tensor([[0.0, 1.0], [0.0, -3.0]]).double()  # spread, but not along (1, 0)
    along = torch.tensor([[1.0, 0.0]]).double()
    assert exact_weight_is_above_merged_weight(along, across, 8.0).gap < 1e-12


def test_the_correction_by_hand():
    """x = +-s: log cosh s = s^2/2 - s^4/12 + ..., of which the correction has the first term."""
    q = torch.ones(1, 1).double()
    sides = exact_weight_is_second_order_weight(q, torch.tensor([[-0.1], [0.1]]).double(), 2.0)
    s = 2 * 0.1
    assert (sides.left - sides.right).item() == pytest.approx(-(s**4) / 12, rel=0.05)


def test_what_is_left_is_of_third_order(normal):
    """A tenth of the spread: a hundredth of the merging error, a thousandth of what is left."""
    q, center = normal(20, 4), normal(1, 4)
    spread = normal(6, 4).square()  # lopsided, so that the third order is there
    wide, narrow = center + 1e-2 * spread, center + 1e-3 * spread

    def ratio(statement) -> float:
        return statement(q, wide, 1.0).gap / statement(q, narrow, 1.0).gap

    assert ratio(exact_weight_is_above_merged_weight) == pytest.approx(100, rel=0.1)
    assert ratio(exact_weight_is_second_order_weight) == pytest.approx(1000, rel=0.1)


def test_far_from_the_mean_the_correction_is_no_bound(normal):
    """A wide slot at a high beta: what is exact stays within log c of its largest product."""
    q, keys = normal(5, 4), normal(6, 4)
    sides = exact_weight_is_second_order_weight(q, keys, 8.0)
    assert (sides.right - sides.left).max() > 10
    above = sides.left - (8.0 * q @ keys.mT).amax(-1)
    assert above.min() >= 0
    assert above.max() <= torch.tensor(6.0).double().log()


def test_covariance_is_torchs(normal):
    keys = normal(6, 4)
    torch.testing.assert_close(key_covariance(keys), torch.cov(keys.mT, correction=0))


@pytest.mark.parametrize("spread", [0.01, 0.5, 10.0])
def test_the_trace_is_one_minus_the_squared_norm_of_the_mean(normal, spread):
    keys = torch.nn.functional.normalize(normal(1, 4) + spread * normal(20, 4), dim=-1)
    sides = trace_of_covariance_is_one_minus_squared_norm(keys)
    assert sides.gap < 1e-12
    assert sides.left > 0


def test_for_unit_norms_alone(unit):
    assert trace_of_covariance_is_one_minus_squared_norm(1.5 * unit(20, 4)).gap > 1
