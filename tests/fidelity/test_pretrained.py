"""What is captured of a pretrained model is what its layers compute with."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ovq.fidelity.pretrained import AFTER, BEFORE, capture, encode, load_pretrained

TOKENS = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def captured(model):
    ids = torch.arange(TOKENS)[None] % 50
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda m, args, o: outputs.append(args[0]))
        for layer in model.model.layers
    ]
    samples = list(capture(model, ids))
    for hook in hooks:
        hook.remove()
    return samples, outputs


def test_two_samples_a_layer(captured):
    samples, _ = captured
    names = [(s.distribution, s.part) for s in samples]
    assert names == [(d, layer) for layer in range(3) for d in (BEFORE, AFTER)]
    assert all(s.q.shape == (TOKENS, 4, 8) and s.k.shape == (TOKENS, 2, 8) for s in samples)


def test_full_attention_on_them_is_what_the_layer_computes(captured):
    samples, outputs = captured
    for sample, output in zip(samples[1::2], outputs, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (sample.q, sample.k, sample.v))
        o = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=sample.beta, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(o.flatten(1), output[0], atol=1e-5, rtol=1e-5)


def test_rotation_is_all_that_lies_between(captured):
    samples, _ = captured
    for before, after in zip(samples[::2], samples[1::2], strict=True):
        torch.testing.assert_close(before.k[0], after.k[0])  # position 0
        torch.testing.assert_close(before.k.norm(dim=-1), after.k.norm(dim=-1))
        assert not torch.allclose(before.k[5], after.k[5])
        assert before.v.equal(after.v)


def test_the_model_is_left_as_it_was(model, captured):
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_of_another_type_is_refused(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    ).save_pretrained(tmp_path)
    vocabulary = tmp_path / "tokenizer.json"
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ValueError, match="Llama type"):
        load_pretrained(str(tmp_path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a file that is there"):
        load_pretrained(str(tmp_path / "none.gguf"))


def test_a_short_text_is_refused():
    class Tokenizer:
        def __call__(self, text, return_tensors, verbose):
            assert not verbose
            return type("Encoding", (), {"input_ids": torch.arange(len(text.split()))[None]})

    assert encode(Tokenizer(), "a b c d", 3).tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="at least 5 tokens, got 4"):
        encode(Tokenizer(), "a b c d", 5)
