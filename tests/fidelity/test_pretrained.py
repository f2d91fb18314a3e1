"""What is captured of a pretrained model is what its layers compute with."""

import logging

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from ovq.fidelity import pretrained
from ovq.fidelity.pretrained import (
    AFTER,
    BEFORE,
    capture,
    encode,
    fingerprint,
    load_pretrained,
    pretrained_samples,
)

TOKENS = 40
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


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


def check_rotation(samples):
    for before, after in zip(samples[::2], samples[1::2], strict=True):
        torch.testing.assert_close(before.k[0], after.k[0])  # position 0
        torch.testing.assert_close(before.k.norm(dim=-1), after.k.norm(dim=-1))
        assert not torch.allclose(before.k[5], after.k[5])
        assert before.v.equal(after.v)


def test_rotation_is_all_that_lies_between(captured):
    samples, _ = captured
    check_rotation(samples)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
        (Olmo2ForCausalLM, Olmo2Config(**SIZES)),
    ],
    ids=["of heads", "of all heads"],
)
def test_so_it_is_where_queries_and_keys_are_normed_before_it(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for module in model.modules():
        if hasattr(module, "q_norm"):
            torch.nn.init.uniform_(module.q_norm.weight, 0.5, 2)
    check_rotation(list(capture(model, torch.arange(TOKENS)[None])))


def test_what_else_changes_queries_or_keys_is_refused():
    transposed = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8)).eval()
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    yarn["original_max_position_embeddings"] = 64
    scaled = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=yarn)).eval()
    for model in (transposed, scaled):
        with pytest.raises(ValueError, match="by RoPE and change them in no other way"):
            next(capture(model, torch.arange(TOKENS)[None]))


def test_the_model_is_left_as_it_was(model, captured):
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def save_tokenizer(folder):
    """Of the numbers below 50."""
    vocabulary = {str(number): number for number in range(50)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


TEXT = " ".join(str(number % 50) for number in range(TOKENS))


def test_the_samples_of_a_folder_are_those_of_its_model(folder, captured):
    found, number = pretrained_samples(str(folder), TEXT, TOKENS)
    samples = list(found)
    assert len(samples) == number == 6
    for ours, theirs in zip(samples, captured[0], strict=True):
        assert (ours.distribution, ours.part, ours.beta) == (
            theirs.distribution, theirs.part, theirs.beta,
        )  # fmt: skip
        assert all(getattr(ours, x).equal(getattr(theirs, x)) for x in "qkv")


def test_more_tokens_than_a_model_knows_positions_are_refused(folder):
    with pytest.raises(ValueError, match=r"must know 2,049 positions, got .* with 2,048"):
        pretrained_samples(str(folder), TEXT, 2049)


@pytest.mark.parametrize("size", [0, 5, 60, 20_000])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model_is_refused_in_one_line(folder, name, size):
    path = folder / name
    path.write_bytes(path.read_bytes()[: min(size, path.stat().st_size // 2)])
    with pytest.raises(ValueError, match=r"that transformers loads, got .*/model: ") as found:
        load_pretrained(str(folder))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("size", [0, 3, 20, 60])
def test_a_damaged_gguf_file_is_refused_in_one_line(tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes((b"GGUF" + (3).to_bytes(4, "little") + (7).to_bytes(8, "little") * 9)[:size])
    with pytest.raises(ValueError, match=r"that transformers loads, got .*cut\.gguf: ") as found:
        load_pretrained(str(path))
    assert "\n" not in str(found.value)


def test_a_model_without_all_its_weights_is_refused(model, folder):
    """transformers draws those that are missing at random."""
    weights = {n: x for n, x in model.state_dict().items() if "layers.1.self_attn.k_proj" not in n}
    model.save_pretrained(folder, state_dict=weights)
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.self_attn\.k_proj"):
        load_pretrained(str(folder))


@pytest.mark.parametrize("shown", [False, True])
def test_the_bar_of_gguf_files_obeys_the_switch(folder, monkeypatch, capsys, shown):
    loading, levels = pretrained._load, []

    def load(place, file):
        assert list(modeling_gguf_pytorch_utils.tqdm(range(3), desc="tensors")) == [0, 1, 2]
        levels.append(logging.getLogger("huggingface_hub").level)
        return loading(place, file)

    monkeypatch.setattr(pretrained, "_load", load)
    bar, level = modeling_gguf_pytorch_utils.tqdm, logging.getLogger("huggingface_hub").level
    monkeypatch.setattr(transformers_logging, "_tqdm_active", shown)
    assert transformers_logging.is_progress_bar_enabled() == shown
    load_pretrained(str(folder))
    assert ("tensors" in capsys.readouterr().err) == shown
    assert levels == [logging.ERROR]  # a name that cannot be fetched is one line, not its retries
    assert modeling_gguf_pytorch_utils.tqdm is bar
    assert logging.getLogger("huggingface_hub").level == level


def test_the_fingerprint_is_that_of_the_text_and_of_what_is_loaded(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    (folder / "README.md").write_text("read by nobody")
    first = fingerprint(str(folder), text)
    assert {"text", "model/model.safetensors", "model/config.json", "model/tokenizer.json"} <= set(
        first
    )
    assert "model/README.md" not in first
    assert first["text"]["bytes"] == len(TEXT)
    text.write_text(TEXT.replace("7", "8"))
    changed = fingerprint(str(folder), text)
    assert {name for name in first if first[name] != changed[name]} == {"text"}
    assert set(fingerprint("fetched-by-name", text)) == {"text"}


def test_a_model_of_another_type_is_refused(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    ).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="Llama type"):
        load_pretrained(str(tmp_path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a file that is there"):
        load_pretrained(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("source", ["", "text.txt"])
def test_what_is_no_model_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(ValueError, match=r"a folder, a name or a \.gguf file, got '"):
        load_pretrained(source)


def test_a_short_text_is_refused():
    class Words:
        bos_token_id = None

        def __call__(self, text, verbose, add_special_tokens=True):
            assert not verbose
            return type("Encoding", (), {"input_ids": list(range(len(text.split())))})

    assert encode(Words(), "a b c d", 3).tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="at least 5 tokens, got 4"):
        encode(Words(), "a b c d", 5)
    spread = (" " * 50).join("abcd")  # more characters a token than its start is taken of
    assert encode(Words(), spread, 3).tolist() == [[0, 1, 2]]
