"""Going on from a state that ``generate()`` or a call of the model returned."""

import pytest
import torch

from ovq.models import OVQCache
from ovq.models.cache import CACHE_FIELD
from tests.models.generating import KINDS, generate, left_padded

# transformers 5.24 warns of the old name, and translates it.
OLD = pytest.param("past_key_values", marks=pytest.mark.filterwarnings("ignore:.*is deprecated"))


def first_turn(model, prompt, **options):
    """Texts of a first turn, and the cache after all of their columns but the last."""
    output = generate(model, prompt, 8, return_dict_in_generate=True, **options)
    return output.sequences, output[CACHE_FIELD]


def numbers(cache: OVQCache) -> list:
    """Copies of the tensors that a cache holds."""
    held = [value for state in cache.states for value in vars(state).values()]
    held += [inner for value in held for inner in getattr(value, "__dict__", {}).values()]
    return [value.clone() for value in held if isinstance(value, torch.Tensor)]


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", KINDS, ids="-".join)
def test_a_second_turn_equals_one_prompt_of_both(make_model, token_ids, layer_pattern):
    model = make_model(layer_pattern=layer_pattern)
    text, cache = first_turn(model, token_ids)
    assert isinstance(cache, OVQCache)
    assert cache.get_seq_length() == text.shape[1] - 1  # the last token was never read
    whole = torch.cat([text, token_ids[:, :4]], dim=1)
    expected = generate(model, whole, 6)
    before = numbers(cache)
    new, mask = whole[:, cache.get_seq_length() :], torch.ones_like(whole)
    for piece in (None, 3):
        options = {"cache": cache, "prefill_chunk_size": piece}
        assert generate(model, whole, 6, **options).equal(expected)
        told_by_mask = generate(model, new, 6, attention_mask=mask, **options)
        assert told_by_mask.equal(expected[:, -11:])
        as_prefix = generate(model, new, 6, **options | {"cache": cache.as_prefix()})
        assert as_prefix.equal(told_by_mask)
    assert len(before) > len(cache.states)
    assert all(a.equal(b) for a, b in zip(before, numbers(cache), strict=True))


@pytest.mark.parametrize("name", ["cache", OLD])
def test_names_of_the_cache(make_model, token_ids, name):
    model = make_model()
    text, cache = first_turn(model, token_ids)
    assert generate(model, text, **{name: cache}).equal(generate(model, text))


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", KINDS, ids="-".join)
def test_a_second_turn_of_a_ragged_batch_in_which_rows_ended(make_model, token_ids, layer_pattern):
    """Neither the padding before a prompt nor that after its end enters a row's state."""
    model = make_model(layer_pattern=layer_pattern)
    starts = (0, 9, 22)
    prompt, mask = left_padded(token_ids, starts)
    text = generate(model, prompt, 8, attention_mask=mask)
    end = int(text[1, 24])  # the second token of the second row
    text, cache = first_turn(model, prompt, attention_mask=mask, eos_token_id=end)
    ended = (text[:, 23:] == end).int()
    real = (ended.cumsum(1) - ended == 0).long()  # all to the first end
    assert real[1].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert text[1, 25:].eq(0).all()
    whole = torch.cat([text, token_ids[:, :4]], dim=1)
    mask = torch.cat([mask, real, torch.ones(3, 4, dtype=torch.int64)], dim=1)
    num_read = mask[:, : cache.get_seq_length()].sum(1)
    assert all(state.num_tokens.equal(num_read) for state in cache.states)
    together = generate(model, whole, 5, attention_mask=mask, cache=cache)
    for row in range(3):
        own = generate(model, whole[row, mask[row] == 1][None], 5)
        assert together[row, -5:].equal(own[0, -5:])


@pytest.mark.plain
def test_one_state_goes_on_in_many_ways(make_model, token_ids):
    model = make_model().double()
    cache = model(token_ids[:2]).get(CACHE_FIELD)
    question = token_ids[1:, :5]
    whole = torch.cat([token_ids[:2], question], dim=1)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 2, "prefill_chunk_size": 2},
    ):
        torch.manual_seed(0)
        expected = generate(model, whole, 6, **options)
        torch.manual_seed(0)
        assert generate(model, whole, 6, cache=cache, **options).equal(expected)
        torch.manual_seed(0)
        got = generate(model, question, 6, cache=cache.as_prefix(), **options)
        assert got.equal(expected[:, 23:])
    same_row = cache.select_rows(torch.zeros(4, dtype=torch.int64)).as_prefix()
    answers = generate(model, token_ids.repeat(2, 1)[:4, :5], cache=same_row)
    expected = generate(model, torch.cat([token_ids[:1], token_ids[:1, :5]], dim=1))
    assert answers[0].equal(expected[0, 23:])
    assert answers[3].equal(expected[0, 23:])
    assert not answers[1].equal(expected[0, 23:])


def test_a_state_made_in_inference_mode_goes_on_outside(make_model, token_ids):
    model = make_model()
    with torch.inference_mode():
        text, cache = first_turn(model, token_ids)
    text = text.clone()  # so that its embeddings may be differentiated
    assert generate(model, text, cache=cache).equal(generate(model, text))
    with torch.no_grad():
        logits = model(text[:, -1:], cache=cache).logits
    torch.testing.assert_close(logits, model(text).logits[:, -1:])


def test_two_training_steps_on_a_carried_state(make_model, token_ids):
    """Truncated backpropagation: the detached state has no graph of the step before."""
    model, cache = make_model().train(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in token_ids.split(8, dim=1):
        outputs = model(part, cache=cache, labels=part, use_cache=True)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cache = outputs[CACHE_FIELD].detach()
    assert cache.get_seq_length() == 23
    assert not any(tensor.requires_grad for tensor in numbers(cache))
