"""Padding and neighbours: a row's logits and states are those of its own run."""

import pytest
import torch

from ovq.layers import MIXERS
from ovq.models.cache import CACHE_FIELD
from tests.models.generating import KINDS, PATTERNS

SPANS = {
    "left": [(0, 23), (6, 23), (22, 23)],
    "right": [(0, 23), (0, 17), (0, 1)],
    "both": [(2, 23), (0, 23), (3, 6)],
    "a row of padding alone": [(0, 23), (0, 0), (9, 23)],
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("layer_pattern", KINDS, ids="-".join)
@pytest.mark.parametrize("side", SPANS)
def test_padding_never_enters_a_state(make_model, token_ids, layer_pattern, side):
    """Not even that of huge embeddings."""
    model = make_model(layer_pattern=layer_pattern)
    spans = SPANS[side]
    mask = torch.zeros_like(token_ids)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    padded = torch.where(mask == 1, token_ids, 60)  # its embedding is huge
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = 1e4
    logits = model(padded, attention_mask=mask, use_cache=False).logits
    cached = model(padded, attention_mask=mask)
    cache = cached[CACHE_FIELD]
    more = model(token_ids[:, :5], cache=cache).logits
    for row, (start, stop) in enumerate(spans):
        own = model(padded[row : row + 1, start:stop])
        for together in (logits, cached.logits):
            torch.testing.assert_close(together[row, start:stop], own.logits[0], **CLOSE)
        own_more = model(token_ids[row : row + 1, :5], cache=own[CACHE_FIELD]).logits[0]
        torch.testing.assert_close(more[row], own_more, **CLOSE)
    lengths = [stop - start for start, stop in spans]
    assert [state.num_tokens.tolist() for state in cache.states] == [lengths] * 2
    assert cache.get_seq_length() == 23


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_right_padding_without_a_mask_changes_no_score(make_model, token_ids, layer_pattern):
    """As evaluation harnesses score: batches of any width, and no mask."""
    model = make_model(layer_pattern=layer_pattern)
    for row, length in enumerate((23, 17, 1)):
        own = model(token_ids[row : row + 1, :length]).logits[0]
        for width in (length, 23, 40):
            batch = torch.full((3, width), 60)
            batch[row, :length] = token_ids[row, :length]
            torch.testing.assert_close(model(batch).logits[row, :length], own, **CLOSE)


@pytest.mark.parametrize("name", MIXERS)
def test_rows_do_not_see_each_other(make_model, token_ids, name):
    model = make_model(layer_pattern=[name])
    logits = model(token_ids).logits
    torch.testing.assert_close(model(token_ids.flip(0)).logits.flip(0), logits, **CLOSE)
    for row in range(3):
        own = model(token_ids[row : row + 1]).logits[0]
        torch.testing.assert_close(logits[row], own, **CLOSE)


@pytest.mark.parametrize("name", MIXERS)
def test_a_repeated_call_is_equal_to_the_bit(make_model, token_ids, name):
    model = make_model(layer_pattern=[name])
    assert model(token_ids).logits.equal(model(token_ids).logits)
