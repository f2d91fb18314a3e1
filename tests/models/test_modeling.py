"""The model as a function: losses, states, files, training, bad inputs."""

import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from ovq.layers import MIXERS
from ovq.models import OVQCache, OVQConfig, OVQForCausalLM, OVQModel
from ovq.models.modeling_ovq import CACHE_FIELD


def cache_of(outputs) -> OVQCache:
    return getattr(outputs, CACHE_FIELD)


@pytest.mark.parametrize("name", MIXERS)
def test_carried_cache_equals_one_call(make_model, token_ids, name):
    model = make_model(layer_pattern=[name]).double()  # an output norm magnifies rounding
    whole = model(token_ids)
    cache, logits = None, []
    for part in token_ids.split([1, 7, 1, 14], dim=1):
        outputs = model(part, cache=cache)
        cache = cache_of(outputs)
        logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, atol=1e-10, rtol=1e-10)
    assert cache.get_seq_length() == cache_of(whole).get_seq_length() == 23
    assert cache.num_bytes == 3 * model.state_size(23)


def test_both_names_of_the_cache(make_model, token_ids):
    model = make_model()
    cache = cache_of(model(token_ids[:, :9]))
    new = model(token_ids[:, 9:], cache=cache).logits
    old = model(token_ids[:, 9:], past_key_values=cache).logits
    assert new.equal(old)
    assert not torch.allclose(new, model(token_ids[:, 9:]).logits)


def test_loss_is_the_cross_entropy_of_the_next_token(make_model, token_ids):
    model = make_model()
    labels = token_ids.clone()
    labels[0, :9] = -100
    outputs = model(token_ids, labels=labels)
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    by_hand = -logits.log_softmax(-1)[torch.arange(66), targets.clamp(min=0)][targets >= 0]
    torch.testing.assert_close(outputs.loss, by_hand.mean())
    summed = model(token_ids, labels=labels, num_items_in_batch=100).loss
    torch.testing.assert_close(summed, by_hand.sum() / 100)


def test_logits_to_keep_and_inputs_embeds(make_model, token_ids):
    model = make_model()
    logits = model(token_ids).logits
    embeds = model.get_input_embeddings()(token_ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, logits)
    torch.testing.assert_close(model(token_ids, logits_to_keep=2).logits, logits[:, -2:])
    places = torch.tensor([3, 20])
    torch.testing.assert_close(model(token_ids, logits_to_keep=places).logits, logits[:, places])
    as_tuple = model(token_ids, return_dict=False)
    assert as_tuple[0].equal(logits)
    assert isinstance(as_tuple[1], OVQCache)


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_model_is_identical(make_model, token_ids, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied, use_short_conv=True)
    with torch.no_grad():  # nothing left at its starting value, as after training
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    for loaded in (
        OVQForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert type(loaded) is OVQForCausalLM
        for name, tensor in model.state_dict().items():
            assert tensor.equal(loaded.state_dict()[name]), name
        assert loaded.eval()(token_ids).logits.equal(model(token_ids).logits)
        shared = loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert shared == tied
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is OVQModel
    assert body.eval()(token_ids).last_hidden_state.equal(model.model(token_ids).last_hidden_state)


def test_missing_parameters_start_as_new_ones(make_model, tmp_path):
    """A checkpoint without ``beta`` keeps what it has and starts ``beta`` at 8."""
    model = make_model()
    weights = {n: t for n, t in model.state_dict().items() if "log_beta" not in n}
    loaded = OVQForCausalLM.from_pretrained(None, config=model.config, state_dict=weights)
    torch.testing.assert_close(loaded.model.layers[1].mixer.beta, torch.full((4,), 8.0))
    assert loaded.model.layers[0].mixer.q_proj.weight.equal(
        model.model.layers[0].mixer.q_proj.weight
    )


@pytest.mark.parametrize("name", MIXERS)
def test_the_first_layers_may_start_as_the_identity(make_model, token_ids, tmp_path, name):
    model = make_model(layer_pattern=[name], num_hidden_layers=3, num_identity_layers=2)
    for layer in model.model.layers[:2]:
        x = torch.randn(2, 9, 32)
        assert layer(x)[0].equal(x)
    assert not model.model.layers[2](x)[0].equal(x)
    model.train()(token_ids, labels=token_ids).loss.backward()
    for layer in model.model.layers:
        assert layer.mixer.output_projection.weight.grad.abs().max() > 0
        assert layer.mlp.down_proj.weight.grad.abs().max() > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path)
    loaded = OVQForCausalLM.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert tensor.equal(loaded.state_dict()[key]), key


def test_from_config_registers_and_initialises(token_ids):
    config = OVQConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is OVQForCausalLM
    assert 0.08 < model.model.layers[0].mixer.q_proj.weight.std() < 0.12
    torch.testing.assert_close(model.model.layers[1].mixer.beta, torch.full((8,), 8.0))


def test_two_trainer_steps(make_model, token_ids, tmp_path):
    model = make_model(use_short_conv=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=3, report_to=[],
        gradient_accumulation_steps=2, use_cpu=True, disable_tqdm=True, learning_rate=0.1,
        save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row, "attention_mask": row > 5} for row in token_ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows * 4)
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        assert not tensor.equal(before[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(make_model, token_ids, caplog, reentrant):
    model = make_model(layer_pattern=["sliding_window", "ovq", "full_attention"]).train()

    def gradients():
        model.zero_grad()
        outputs = model(token_ids, labels=token_ids, use_cache=True)
        outputs.loss.backward()
        return cache_of(outputs), [p.grad.clone() for p in model.parameters()]

    cache, expected = gradients()
    assert cache is not None
    # Renamed in transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for _ in range(2):
            cache, replayed = gradients()
            assert cache is None
    finally:
        logger.removeHandler(caplog.handler)
    assert sum("no cache is returned" in line for line in caplog.messages) <= 1  # once a process
    for got, wanted in zip(replayed, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_training_and_scoring_return_no_cache_unless_asked(make_model, token_ids):
    model = make_model()
    assert cache_of(model(token_ids)) is not None
    assert cache_of(model(token_ids, labels=token_ids)) is None
    assert cache_of(model(token_ids, labels=token_ids, use_cache=True)) is not None
    assert cache_of(model.train()(token_ids)) is None
    assert cache_of(model(token_ids, use_cache=True)) is not None


def test_another_dictionary_on_the_same_weights(make_model, token_ids):
    model = make_model()
    small = model(token_ids)
    size = model.state_size(23)
    model.set_dictionary(num_centroids=24)
    assert model.config.dictionary["num_centroids"] == 24
    assert model.config.dictionary["chunk_size"] == 4
    large = model(token_ids)
    assert cache_of(large).num_bytes == 3 * model.state_size(23) > 3 * size
    assert not torch.allclose(large.logits, small.logits)
    with pytest.raises(ValueError, match="state must"):
        model(token_ids, cache=cache_of(small))
    model.set_dictionary(num_centroids=6)
    assert model(token_ids).logits.equal(small.logits)
    with pytest.raises(ValueError, match=r"num_centroids .* got 0"):
        model.set_dictionary(num_centroids=0)
    assert model(token_ids).logits.equal(small.logits)
    with pytest.raises(ValueError, match=r"layer_pattern must hold one of .'ovq', 'windowed_ovq'"):
        make_model(layer_pattern=["full_attention"]).set_dictionary(num_centroids=4)


def test_bfloat16_and_autocast(make_model, token_ids):
    model = make_model()
    exact = model(token_ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(token_ids, labels=token_ids).loss.isfinite()
    model = model.to(torch.bfloat16)
    rounded = model(token_ids)
    assert rounded.logits.dtype == torch.bfloat16
    assert cache_of(rounded).num_bytes == 3 * model.state_size(23)
    assert F.mse_loss(rounded.logits.float(), exact) < 0.05 * exact.var()


@pytest.mark.plain
def test_bad_inputs_raise(make_model, token_ids):
    model = make_model()
    ones = torch.ones_like(token_ids)
    cache = cache_of(model(token_ids))
    other = cache_of(make_model(num_hidden_layers=1)(token_ids))
    full = cache_of(make_model(layer_pattern=["full_attention"])(token_ids))
    for message, arguments in {
        r"attention_mask .*\(3, 23\), got \(3, 22\)": {"attention_mask": ones[:, 1:]},
        r"\(3, 23\), got \(3, 1, 23, 23\)": {"attention_mask": ones.new_ones(3, 1, 23, 23)},
        "attention_mask must hold 0 and 1 alone": {"attention_mask": -1.0 * ones},
        "exactly one of input_ids and inputs_embeds": {"inputs_embeds": torch.ones(3, 23, 32)},
        "cache must hold one state a layer, 2 here, got 1": {"cache": other},
        "cache must be an OVQCache, got list": {"past_key_values": []},
        "must be the same object": {"cache": cache, "past_key_values": other},
        "state must be of": {"cache": full},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(token_ids, **arguments)
    with pytest.raises(ValueError, match="cache must have one row a sequence, 2 here, got 3"):
        model(token_ids[:2], cache=cache)
    with pytest.raises(ValueError, match=r"input_ids must lie in \[0, 61\), got 1 to 61"):
        model(torch.tensor([[1, 61]]))
    with pytest.raises(ValueError, match="input_ids must be whole numbers"):
        model(torch.ones(2, 3))
