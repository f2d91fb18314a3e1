"""What ends ``generate()``, what watches it, and what it refuses."""

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, LlamaConfig, LlamaForCausalLM
from transformers.generation import BaseStreamer

from ovq.models import OVQCache
from tests.models.generating import character_tokenizer, generate


class Recorder(BaseStreamer):
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts.append(value.flatten())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"eos_token_id": 46}])
def test_a_streamer_gets_every_token(make_model, token_ids, options):
    streamer = Recorder()
    text = generate(make_model(), token_ids[:1], streamer=streamer, **options)
    assert torch.cat(streamer.parts).equal(text[0])
    assert [len(part) for part in streamer.parts] == [23] + [1] * (text.shape[1] - 23)
    assert streamer.ended


def test_stop_strings_and_time_end_the_text(make_model, token_ids):
    model, tokenizer = make_model(), character_tokenizer()
    text = generate(model, token_ids[:1])
    stop = tokenizer.decode(text[0, 25:28])
    assert len(stop) == 3
    end = 23 + tokenizer.decode(text[0, 23:]).index(stop) + 3
    assert end < text.shape[1]
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}):
        options |= {"stop_strings": [stop], "tokenizer": tokenizer}
        assert generate(model, token_ids[:1], **options).equal(text[:, :end])
    out_of_time = generate(model, token_ids[:1], max_time=0.0)
    assert out_of_time.equal(text[:, :24])


def test_a_loop_of_the_users_own(make_model, token_ids):
    def two_tokens(model, input_ids, **options):
        for _ in range(2):
            best = model(input_ids, cache=options.get("cache")).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, best], dim=1)
        return input_ids

    model = make_model()
    text = generate(model, token_ids, custom_generate=two_tokens)
    assert text.equal(generate(model, token_ids, num_new=2))
    text = generate(model, token_ids, custom_generate=GenerationMixin._sample)
    assert text.equal(generate(model, token_ids))


@pytest.mark.plain
@pytest.mark.parametrize("name", ["static", "dynamic", "offloaded", "quantized"])
def test_other_implementations_of_a_cache_change_nothing(make_model, token_ids, name):
    model = make_model()
    assert generate(model, token_ids, cache_implementation=name).equal(generate(model, token_ids))


@pytest.mark.plain
def test_modes_that_need_to_take_tokens_back_are_refused(make_model, token_ids):
    model, one = make_model(), token_ids[:1]
    for name, value in {
        "assistant_model": make_model(),
        "prompt_lookup_num_tokens": 3,
        "assistant_early_exit": 1,
    }.items():
        for mode in ({}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}):
            with pytest.raises(ValueError, match=rf"^{name} must not be given: assisted .* cannot"):
                generate(model, one, **{name: value}, **mode)
    with pytest.raises(ValueError, match=r"^assistant_model must not be given"):
        generate(model, token_ids, assistant_model=make_model(), num_beams=2)
    config = LlamaConfig(
        vocab_size=61, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^assistant_model must be able to take tokens back, got"):
        generate(LlamaForCausalLM(config).eval(), one, assistant_model=model)


@pytest.mark.plain
@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.1},
        {"num_beams": 4, "force_words_ids": [[5]]},
    ],
)
def test_modes_that_transformers_left_to_code_elsewhere_are_refused(make_model, token_ids, options):
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        generate(make_model(), token_ids, **options)
    with pytest.raises(ValueError, match=r"^generation mode must be one of .*, got \w+$"):
        generate(make_model(), token_ids, trust_remote_code=True, **options)


@pytest.mark.plain
def test_continuous_batching_is_refused(make_model, token_ids):
    model = make_model()
    with pytest.raises(ValueError, match=r"^continuous batching .* call generate"):
        generate(model, token_ids, cache_implementation="paged")
    with pytest.raises(ValueError, match=r"^continuous batching"):
        model.generate_batch([row.tolist() for row in token_ids])
    with pytest.raises(ValueError, match=r"^continuous batching"):
        model.init_continuous_batching()


@pytest.mark.plain
def test_bad_arguments_raise(make_model, token_ids):
    model = make_model()
    cache = generate(model, token_ids, 2, return_dict_in_generate=True)
    cache = next(value for value in cache.values() if isinstance(value, OVQCache))
    ones = torch.ones_like(token_ids)
    for message, options in {
        "cache must be an OVQCache, got DynamicCache": {"cache": DynamicCache()},
        "cache must be an OVQCache, got list": {"cache": []},
        "cache must be an OVQCache, got tuple": {"cache": ()},
        "use_cache must be True with a cache, got False": {"cache": cache, "use_cache": False},
        r"input_ids must begin with the 24 columns .*as_prefix\(\), .* got 23 columns": {
            "cache": cache
        },
        "attention_mask must have 23 columns, or 47 with .* got 22": {
            "cache": cache, "attention_mask": ones[:, 1:],
        },
        "output_attentions must be False": {"output_attentions": True},
        "output_hidden_states must be False": {"output_hidden_states": True},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{message}"):
            generate(model, token_ids, return_dict_in_generate=True, **options)
    with pytest.raises(ValueError, match=r"^cache must have one row a sequence, 2 here, got 3"):
        generate(model, token_ids[:2], cache=cache.as_prefix())
    with pytest.raises(ValueError, match=r"^Cannot use prefill chunking without a cache"):
        generate(model, token_ids, use_cache=False, prefill_chunk_size=4)
