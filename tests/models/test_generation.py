"""``generate()`` on the carried state: in every mode the same text as without it."""

import pytest
import torch

from tests.models.generating import KINDS, PATTERNS, argmax_loop, generate, left_padded

SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0}
MODES = {
    "greedy": {},
    "sampling": SAMPLING,
    "top k and top p": SAMPLING | {"top_k": 20, "top_p": 0.8},
    "several samples": SAMPLING | {"num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": SAMPLING | {"num_beams": 2},
    "beams that end": {"num_beams": 3, "eos_token_id": [9, 20, 46], "length_penalty": -1.0},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "guidance": {"guidance_scale": 1.5},
    "rows that end": {"eos_token_id": 46},
}


def generate_seeded(model, prompt, num_new=8, **options):
    torch.manual_seed(7)
    return generate(model, prompt, num_new, **options)


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_greedy_equals_the_argmax_loop(make_model, token_ids, layer_pattern):
    """Far past window and chunk."""
    model = make_model(layer_pattern=layer_pattern)
    expected = argmax_loop(model, token_ids)
    assert len(expected[:, 23:].unique()) > 4
    assert generate(model, token_ids).equal(expected)


@pytest.mark.parametrize("layer_pattern", [["sliding_window", "ovq"], ["linear_attention", "vq"]])
def test_greedy_with_short_convolutions(make_model, token_ids, layer_pattern):
    model = make_model(layer_pattern=layer_pattern, use_short_conv=True)
    assert generate(model, token_ids, 9).equal(argmax_loop(model, token_ids, 9))


@pytest.mark.plain
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_itself_without_cache(make_model, token_ids, mode):
    model = make_model().double()  # so that rounding decides nothing
    options = MODES[mode]
    with_cache = generate_seeded(model, token_ids, **options)
    assert with_cache.equal(generate_seeded(model, token_ids, use_cache=False, **options))
    if mode in ("greedy", "several samples", "beams"):
        assert with_cache.equal(generate_seeded(model, token_ids, prefill_chunk_size=6, **options))
    greedy = generate_seeded(model, token_ids)
    assert mode == "greedy" or not greedy.equal(with_cache)


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", KINDS, ids="-".join)
def test_beams_and_samples_of_every_kind_of_memory(make_model, token_ids, layer_pattern):
    model = make_model(layer_pattern=layer_pattern).double()
    prompt, mask = left_padded(token_ids, (0, 9, 21))
    for mode in ("sampled beams", "beams"):
        options = MODES[mode] | {"attention_mask": mask}
        with_cache = generate_seeded(model, prompt, 4, **options)
        assert with_cache.equal(generate_seeded(model, prompt, 4, use_cache=False, **options))


@pytest.mark.plain
def test_sampling_equals_the_loop_by_hand(make_model, token_ids):
    model, text = make_model().double(), token_ids
    torch.manual_seed(7)
    for _ in range(8):
        probabilities = (model(text, use_cache=False).logits[:, -1].float() / 1.5).softmax(-1)
        text = torch.cat([text, torch.multinomial(probabilities, num_samples=1)], dim=1)
    assert generate_seeded(model, token_ids, **SAMPLING).equal(text)
    torch.manual_seed(8)
    assert not generate(model, token_ids, 8, **SAMPLING).equal(text)


@pytest.mark.plain
@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_each_row_of_a_left_padded_batch_equals_its_own_generate(
    make_model, token_ids, layer_pattern
):
    model = make_model(layer_pattern=layer_pattern)
    starts = (0, 9, 22)
    prompt, mask = left_padded(token_ids, starts)
    together = generate(model, prompt, 8, attention_mask=mask)
    for row, start in enumerate(starts):
        own = generate(model, token_ids[row : row + 1, start:], 8)
        assert together[row, 23:].equal(own[0, 23 - start :])
    # A piece of padding alone, the mask from the pad id.
    options = {"attention_mask": None, "prefill_chunk_size": 4}
    assert together.equal(generate(model, prompt, 8, **options))


@pytest.mark.plain
def test_embeddings_in_place_of_ids(make_model, token_ids):
    model = make_model()
    prompt, mask = left_padded(token_ids, (0, 9, 22))
    embeds = model.get_input_embeddings()(prompt)
    expected = generate(model, prompt, 6, attention_mask=mask)
    for options in ({}, {"prefill_chunk_size": 6}):
        options = {"inputs_embeds": embeds, "attention_mask": mask} | options
        assert generate(model, num_new=6, **options).equal(expected[:, 23:])
        assert generate(model, prompt, 6, **options).equal(expected)


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, [23, 1, 1, 1, 1]),
        ({"prefill_chunk_size": 9}, [9, 9, 5, 1, 1, 1, 1]),
        ({"num_beams": 2, "prefill_chunk_size": 23}, [23, 1, 1, 1, 1]),
    ],
)
def test_tokens_of_each_call(make_model, token_ids, options, lengths):
    model, seen = make_model(), []
    model.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    generate(model, token_ids, num_new=5, **options)
    assert seen == lengths


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


@pytest.mark.parametrize("layer_pattern", KINDS, ids="-".join)
def test_bfloat16_in_inference_mode(make_model, token_ids, layer_pattern):
    """Reading on from a state in inference mode loses no more than bfloat16 does in one call."""
    model = make_model(layer_pattern=layer_pattern)
    exact = model(token_ids).logits
    model = model.to(torch.bfloat16)
    with torch.inference_mode():
        text = generate(model, token_ids, 3, return_dict_in_generate=True, output_logits=True)
        whole = model(text.sequences).logits[:, 22:-1]
        error = (model(token_ids).logits.float() - exact).square().mean().sqrt()
    for step, logits in enumerate(text.logits):
        assert logits.isfinite().all()
        assert (logits - whole[:, step].float()).square().mean().sqrt() < 2 * error
