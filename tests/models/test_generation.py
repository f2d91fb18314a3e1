"""``generate()`` on the carried state: the same text as without it, in constant memory."""

import pytest
import torch

from ovq.models import OVQCache

PATTERNS = [
    ["sliding_window", "ovq"],
    ["full_attention", "ovq"],
    ["full_attention_nope", "sliding_window"],
    ["sliding_window", "vq"],
    ["vq_static_values", "linear_attention"],
    ["linear_attention_normalized", "sliding_window"],
]


def generate(model, prompt, num_new=20, **options):
    options = {"do_sample": False, "pad_token_id": 0} | options
    return model.generate(prompt, max_new_tokens=num_new, **options)


@pytest.mark.parametrize("layer_pattern", PATTERNS)
@pytest.mark.parametrize("use_short_conv", [False, True])
def test_greedy_with_and_without_cache_equals_the_argmax_loop(
    make_model, token_ids, layer_pattern, use_short_conv
):
    """Far past window and chunk."""
    model = make_model(layer_pattern=layer_pattern, use_short_conv=use_short_conv)
    expected = token_ids
    for _ in range(20):
        best = model(expected).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, best], dim=1)
    assert generate(model, token_ids).equal(expected)
    assert generate(model, token_ids, use_cache=False).equal(expected)


def test_decoding_reads_one_token_at_a_time(make_model, token_ids):
    model, lengths = make_model(), []
    model.model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    generate(model, token_ids, num_new=5)
    assert lengths == [23, 1, 1, 1, 1]


def test_sampling_repeats_with_its_seed(make_model, token_ids):
    model = make_model()
    texts = []
    for seed, use_cache in ((7, True), (7, True), (7, False), (8, True)):
        torch.manual_seed(seed)
        texts.append(
            generate(model, token_ids, do_sample=True, temperature=2.0, use_cache=use_cache)
        )
    assert texts[0].equal(texts[1])
    assert texts[0].equal(texts[2])
    assert not texts[0].equal(texts[3])


def test_beams_equal_those_without_cache(make_model, token_ids):
    model = make_model()
    options = {"num_beams": 3, "num_return_sequences": 2}
    with_cache = generate(model, token_ids, **options)
    assert with_cache.equal(generate(model, token_ids, use_cache=False, **options))


@pytest.mark.parametrize("layer_pattern", PATTERNS)
def test_each_row_of_a_left_padded_batch_equals_its_own_generate(
    make_model, token_ids, layer_pattern
):
    model = make_model(layer_pattern=layer_pattern)
    starts = (0, 9, 22)
    mask = torch.stack([torch.arange(23) >= start for start in starts]).long()
    prompts = token_ids.masked_fill(mask == 0, 0)
    together = generate(model, prompts, attention_mask=mask)
    for row, start in enumerate(starts):
        own = generate(model, token_ids[row : row + 1, start:])
        assert together[row, 23:].equal(own[0, 23 - start :])


def test_state_bytes_stay_constant_past_the_window(make_model, token_ids):
    model, num_bytes = make_model(), []
    cache = None
    for num_tokens, token in enumerate(token_ids.unbind(1), start=1):
        outputs = model(token[:, None], cache=cache, return_dict=False)
        cache = outputs[1]
        num_bytes.append(cache.num_bytes)
        assert cache.num_bytes == 3 * model.state_size(num_tokens)
    window = model.config.window_size
    assert len(set(num_bytes[window - 2 :])) == 1
    full = make_model(layer_pattern=["full_attention"])
    assert full.state_size(1000) > full.state_size(999)


def test_a_returned_cache_goes_on(make_model, token_ids):
    """A second turn from the state of the first equals one prompt of both."""
    model = make_model()
    first = generate(model, token_ids, return_dict_in_generate=True)
    field = "cache" if "cache" in first else "past_key_values"
    cache = first[field]
    assert isinstance(cache, OVQCache)
    # The last token was never read.
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    whole = torch.cat([first.sequences, token_ids[:, :4]], dim=1)
    second = generate(model, whole, **{field: cache})
    assert second.equal(generate(model, whole))


def test_prefill_in_chunks(make_model, token_ids):
    model = make_model()
    field = "cache" if "cache" in model(token_ids) else "past_key_values"
    chunked = generate(model, token_ids, prefill_chunk_size=6, **{field: OVQCache()})
    assert chunked.equal(generate(model, token_ids))


def test_assisted_decoding_is_refused(make_model, token_ids):
    model = make_model()
    with pytest.raises(ValueError, match="not supported with stateful models"):
        generate(model, token_ids[:1], assistant_model=make_model())
