"""Models with more or fewer tokens, with other embeddings, and copies of models."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.saving import ALL, IDS, assert_same, trained

pytestmark = pytest.mark.plain  # what is tested are values, not shapes


@pytest.mark.parametrize("num_tokens", [70, 50])
@pytest.mark.parametrize("tied", [False, True])
def test_with_more_or_fewer_tokens(make_model, tmp_path, tied, num_tokens):
    model = trained(make_model, tie_word_embeddings=tied)
    ids = IDS.clamp(max=49)
    before = model(ids).logits.detach()
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    kept = min(num_tokens, 61)
    assert model.config.vocab_size == num_tokens
    assert model(ids).logits.shape[-1] == num_tokens
    assert torch.allclose(model(ids).logits[..., :kept], before[..., :kept], atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(loaded, model, ids)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert loaded.generate(ids, **options).equal(model.generate(ids, **options))
    loaded.train()(ids, labels=ids).loss.backward()
    assert loaded.get_input_embeddings().weight.grad.shape == (num_tokens, 32)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_can_be_had_and_set(make_model, tied):
    model = make_model(tie_word_embeddings=tied)
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    before = model(IDS).logits
    model.set_input_embeddings(torch.nn.Embedding(61, 32))
    model.tie_weights()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not torch.allclose(model(IDS).logits, before)
    model.set_output_embeddings(torch.nn.Linear(32, 5, bias=False))
    assert model(IDS).logits.shape[-1] == 5


def test_a_copy_is_of_its_own(make_model):
    model = trained(make_model, **ALL)
    copied = copy.deepcopy(model)
    assert_same(copied, model)
    before = model(IDS).logits
    with torch.no_grad():
        for tensor in copied.state_dict().values():
            tensor.mul_(2)
    copied.set_dictionary(num_centroids=2)
    assert model(IDS).logits.equal(before)
    assert model.config.dictionary["num_centroids"] == 6
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert model.num_parameters() == model.num_parameters(only_trainable=True) == expected
