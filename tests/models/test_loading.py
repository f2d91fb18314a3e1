"""Models in files: every tensor and every logit come back, however they are saved and placed."""

import copy
import json
from dataclasses import fields, is_dataclass

import accelerate
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from ovq.layers import MIXERS
from ovq.layers.recurrent import RecurrentMixer
from ovq.models import OVQForCausalLM, OVQModel
from ovq.models.cache import CACHE_FIELD
from tests.models.saving import ALL, HYBRID, IDS, assert_same, trained

pytestmark = pytest.mark.plain  # what is tested are values, not shapes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*MIXERS, "-".join(HYBRID)])
def test_every_tensor_and_every_logit_come_back(make_model, tmp_path, name, tied):
    model = trained(make_model, layer_pattern=name.split("-"), tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_new_model_comes_back(make_model, tmp_path, tied):
    """Codebooks, which no training has seen, too; and the decoder by itself."""
    model = AutoModelForCausalLM.from_config(make_model(**ALL, tie_word_embeddings=tied).config)
    model.eval().save_pretrained(tmp_path)
    assert_same(OVQForCausalLM.from_pretrained(tmp_path), model)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert type(decoder) is OVQModel
    found = decoder.eval()(IDS).last_hidden_state
    assert found.equal(model.model(IDS).last_hidden_state)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")], ids=str)
def test_placed_by_a_device_map(make_model, tmp_path, device_map):
    model = trained(make_model, **ALL)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    assert_same(loaded, model)


def test_made_without_memory_and_then_loaded(make_model, tmp_path):
    model = trained(make_model, **ALL)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config)
    assert {tensor.device.type for tensor in made.state_dict().values()} == {"meta"}
    assert made.state_size(100) == model.state_size(100)
    made.load_state_dict(model.state_dict(), assign=True)
    made.tie_weights()
    assert_same(made, model)
    with accelerate.init_empty_weights():
        made = AutoModelForCausalLM.from_config(model.config)
    placed = accelerate.load_checkpoint_and_dispatch(made, str(tmp_path), device_map={"": "cpu"})
    # A copy, because accelerate leaves the tensors where the file is mapped into memory.
    assert_same(copy.deepcopy(placed), model)


@pytest.mark.parametrize("name", MIXERS)
def test_offloaded_to_disk_it_is_the_same_or_refused(make_model, tmp_path, name):
    model = trained(make_model, layer_pattern=[name])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map={
            "model.embed_tokens": "cpu",
            "model.layers": "disk",
            "model.norm": "cpu",
            "lm_head": "cpu",
        },
        offload_folder=tmp_path / "offload",
    )
    assert {parameter.device.type for parameter in loaded.model.layers.parameters()} == {"meta"}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if isinstance(model.model.layers[0].mixer, RecurrentMixer):
        with pytest.raises(ValueError, match="weights, which must not be offloaded"):
            loaded(IDS)
    else:
        assert loaded(IDS).logits.equal(model(IDS).logits)
        assert loaded.generate(IDS, **options).equal(model.generate(IDS, **options))


def float_types(state: object) -> set[torch.dtype]:
    """Of what a mixer remembers, but for inputs kept as they came."""
    if isinstance(state, Tensor):
        return {state.dtype} if state.is_floating_point() else set()
    parts = [f.name for f in fields(state)] if is_dataclass(state) else []
    return set().union(*(float_types(getattr(state, n)) for n in parts if n != "conv_inputs"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_in_another_precision(make_model, tmp_path, dtype):
    """Loaded so, converted, and loaded as saved so; what mixers sum up stays in float32."""
    model = trained(make_model, **ALL)
    model.save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype).eval()
    converted = model.half() if dtype == torch.float16 else model.to(dtype)
    assert_same(loaded, converted)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    outputs = loaded(IDS)
    assert outputs.logits.dtype == dtype
    assert outputs.logits.isfinite().all()
    wide = torch.promote_types(dtype, torch.float32)
    for name, state in zip(MIXERS, outputs[CACHE_FIELD].states, strict=True):
        exact = name.startswith(("full_attention", "sliding_window"))
        assert float_types(state) == {dtype if exact else wide}, name
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert_same(again, loaded)


@pytest.mark.parametrize("tied", [False, True])
def test_in_many_files(make_model, tmp_path, tied):
    model = trained(make_model, **ALL, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 5
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    whole = shards[2].read_bytes()
    shards[2].write_bytes(whole[:-1])
    with pytest.raises(SafetensorError, match="file not fully covered"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    shards[2].unlink()
    with pytest.raises(OSError, match=shards[2].name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_another_dictionary_is_saved_and_can_be_given(make_model, tmp_path):
    model = trained(make_model)
    model.set_dictionary(num_centroids=11, growth="immediate")
    model.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert json.loads((tmp_path / "config.json").read_text())["dictionary"]["num_centroids"] == 11
    larger = AutoModelForCausalLM.from_pretrained(tmp_path, dictionary={"num_centroids": 24})
    assert larger.config.dictionary == model.config.dictionary | {"num_centroids": 24}
    model.set_dictionary(num_centroids=24)
    assert_same(larger, model)


def test_generation_settings_are_saved_with_the_model(make_model, tmp_path):
    model = trained(make_model, eos_token_id=7, pad_token_id=3)
    model.generation_config.update(max_new_tokens=6, do_sample=True, top_k=2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = loaded.generation_config
    assert (found.eos_token_id, found.pad_token_id, found.top_k) == (7, 3, 2)
    texts = []
    for each in (model, loaded):
        torch.manual_seed(0)
        texts.append(each.generate(IDS))
    assert texts[0].equal(texts[1])
    assert texts[0].shape == (2, 19)
