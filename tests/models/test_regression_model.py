"""The model of numbers: the same decoder, other ends."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

from ovq.layers import MIXERS
from ovq.layers.registry import WITH_SHORT_CONV
from ovq.models import OVQCache, OVQForCausalLM, OVQForRegression, OVQRegressionConfig
from ovq.models.cache import CACHE_FIELD
from ovq.models.regression import squared_error
from ovq.tasks import InContextRegressionTask, Split, TaskDataset

TASK = InContextRegressionTask(context_length=24, num_features=2, num_functions=3, code_length=4)


def make(**changes) -> OVQForRegression:
    """A model in evaluation mode, the same weights each time."""
    fields = {
        "num_inputs": TASK.num_inputs,
        "num_outputs": TASK.num_outputs,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "layer_pattern": ["sliding_window", "ovq"],
        "window_size": 5,
        "dictionary": {"num_centroids": 6, "chunk_size": 4},
        "num_codes": 7,
        "block_size": 3,
        "initializer_range": 0.3,
    } | changes
    torch.manual_seed(0)
    return OVQForRegression(OVQRegressionConfig(**fields)).eval()


@pytest.fixture
def batch():
    return TaskDataset(TASK, num_sequences=3, seed=0, split=Split.TRAIN).batch(range(3))


def cache_of(outputs) -> OVQCache:
    return getattr(outputs, CACHE_FIELD)


@pytest.mark.parametrize("name", MIXERS)
def test_carried_state_equals_one_call_of_every_mixer(batch, name):
    model = make(layer_pattern=[name], use_short_conv=name in WITH_SHORT_CONV).double()
    whole = model(batch["inputs"])
    assert whole.predictions.shape == (3, 24, 1)
    cache, predictions = None, []
    for part in batch["inputs"].split([1, 7, 1, 15], dim=1):
        outputs = model(part, cache=cache)
        cache = cache_of(outputs)
        predictions.append(outputs.predictions)
    torch.testing.assert_close(torch.cat(predictions, 1), whole.predictions, atol=1e-9, rtol=1e-9)
    assert cache.num_bytes == 3 * model.state_size(24)
    old = model(batch["inputs"][:, 8:], past_key_values=cache_of(model(batch["inputs"][:, :8])))
    torch.testing.assert_close(old.predictions, whole.predictions[:, 8:], atol=1e-9, rtol=1e-9)


def test_predictions_see_no_later_place_and_all_earlier_ones(batch):
    model = make(layer_pattern=["ovq"])
    inputs = batch["inputs"][:1].clone().requires_grad_()
    outputs = model(inputs).predictions[0, :, 0]
    for place in (0, 9, 23):
        (gradient,) = torch.autograd.grad(outputs[place], inputs, retain_graph=True)
        seen = gradient[0].abs().sum(1) > 0
        assert seen.tolist() == [True] * (place + 1) + [False] * (23 - place)


def test_loss_is_the_mean_squared_error_of_what_is_asked(batch):
    model = make()
    outputs = model(**batch)
    asked = torch.arange(0, 24, 2)
    difference = outputs.predictions[:, asked] - batch["targets"][:, asked]
    torch.testing.assert_close(outputs.loss, difference.square().mean())
    assert model(batch["inputs"]).loss is None
    # What is predicted where nothing is asked has no say, not even by a NaN in the gradient.
    outputs.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    predictions = torch.zeros(1, 3, 1, requires_grad=True)
    squared_error(predictions, torch.tensor([[[2.0], [math.nan], [4.0]]])).backward()
    assert predictions.grad.flatten().tolist() == [-2.0, 0.0, -4.0]
    assert squared_error(torch.ones(1, 2, 1), torch.full((1, 2, 1), math.nan)) == 0.0


def test_zeros_have_about_the_error_one_of_the_task():
    dataset = TaskDataset(TASK, num_sequences=200, seed=0, split=Split.EVALUATE)
    targets = dataset.batch(range(200))["targets"]
    assert float(squared_error(torch.zeros_like(targets), targets)) == pytest.approx(1, abs=0.1)


def test_training_includes_the_auxiliary_loss(batch):
    model = make(layer_pattern=["vq"]).train()
    outputs = model(**batch)
    errors = squared_error(outputs.predictions, batch["targets"])
    assert outputs.loss > errors + 1e-9


def test_padding_changes_nothing(batch):
    model = make()
    expected = model(batch["inputs"][:, :20])
    padded = torch.cat([torch.full((3, 4, TASK.num_inputs), 99.0), batch["inputs"][:, :20]], dim=1)
    mask = (torch.arange(24) >= 4).long().expand(3, -1)
    found = model(padded, attention_mask=mask)
    torch.testing.assert_close(found.predictions[:, 4:], expected.predictions)


def test_saved_and_loaded_model_is_identical(batch, tmp_path):
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["num_inputs"] == TASK.num_inputs
    assert type(AutoConfig.from_pretrained(tmp_path)) is OVQRegressionConfig
    for loaded in (OVQForRegression.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is OVQForRegression
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert tensor.equal(loaded.state_dict()[name]), name
        predictions = loaded.eval()(batch["inputs"]).predictions
        assert predictions.equal(model(batch["inputs"]).predictions)


def test_state_in_a_file(batch, tmp_path):
    model = make()
    cache = cache_of(model(batch["inputs"][:, :10]))
    cache.save(tmp_path / "state", model=model)
    loaded = OVQCache.load(tmp_path / "state", model=model)
    rest = batch["inputs"][:, 10:]
    assert model(rest, cache=loaded).predictions.equal(model(rest, cache=cache).predictions)


def test_the_decoder_is_that_of_the_language_model(batch):
    """Equal shapes but for the ends, and no parameter of a vocabulary."""
    model = make()
    language = OVQForCausalLM(model.config)
    decoder = {n: p.shape for n, p in language.model.named_parameters() if "embed" not in n}
    assert {n: p.shape for n, p in model.model.named_parameters()} == decoder
    assert model.get_input_embeddings() is model.read_in
    ends = (TASK.num_inputs + 1) * 32 + 33
    assert model.num_parameters() == sum(map(math.prod, decoder.values())) + ends


def test_another_dictionary_on_the_same_weights(batch):
    model = make()
    small, size = model(batch["inputs"]).predictions, model.state_size(24)
    model.set_dictionary(num_centroids=24)
    assert model.state_size(24) > size
    assert not torch.allclose(model(batch["inputs"]).predictions, small)
    model.set_dictionary(num_centroids=6)
    assert model(batch["inputs"]).predictions.equal(small)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_learns_one_function(tmp_path, accumulation):
    task = InContextRegressionTask(
        context_length=16, num_features=1, num_functions=1, code_length=2
    )
    dataset = TaskDataset(task, num_sequences=32 * 30, seed=0, split=Split.TRAIN)
    model = make(num_inputs=task.num_inputs, layer_pattern=["full_attention_nope"])
    first = dataset.batch(range(64))
    before = squared_error(model(first["inputs"]).predictions, first["targets"]).item()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=30 // accumulation, learning_rate=3e-3,
        per_device_train_batch_size=32, gradient_accumulation_steps=accumulation, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert abs(losses[0] - before) < 0.5 * before  # not summed over the batches
    assert losses[-1] < 0.7 * losses[0]


def test_bfloat16(batch):
    model = make()
    exact = model(**batch)
    rounded = model.to(torch.bfloat16)(**batch)
    assert rounded.predictions.dtype == torch.bfloat16
    assert rounded.loss.dtype == torch.float32
    assert rounded.loss.item() == pytest.approx(exact.loss.item(), rel=0.1)


@pytest.mark.plain
def test_bad_inputs_raise(batch):
    model = make()
    for message, arguments in {
        r"inputs must be numbers \[B, T, 8\], got torch.float32 \(3, 24, 7\)": {
            "inputs": batch["inputs"][..., 1:]
        },
        r"inputs must be numbers \[B, T, 8\], got torch.int64 \(3, 24, 8\)": {
            "inputs": batch["inputs"].long()
        },
        r"inputs must be numbers .* \(24, 8\)": {"inputs": batch["inputs"][0]},
        r"targets must be numbers \[B, T, 1\], got torch.float32 \(3, 24\)": {
            "inputs": batch["inputs"], "targets": batch["targets"][..., 0]
        },
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    for fields in ({"num_inputs": 0}, {"num_outputs": True}):
        (name,) = fields
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got"):
            make(**fields)
