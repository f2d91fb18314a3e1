"""Weights that are damaged, missing, of another size or changed after they were loaded."""

import pytest
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from ovq.models import OVQForCausalLM
from tests.models.saving import ALL, assert_same, trained

pytestmark = pytest.mark.plain  # what is tested are values, not shapes


def test_a_damaged_file_is_refused(make_model, tmp_path):
    model = trained(make_model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    damaged = [whole[:length] for length in (0, 7, 100, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"0", whole[:8] + b"x" + whole[9:]]
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(SafetensorError):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    file.write_bytes(whole.replace(b"[61,32]", b"[32,61]", 1))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_loaded_model_is_not_changed_with_its_file(make_model, tmp_path):
    """Nor does saving a model where it came from, as training on does, hurt it."""
    model = trained(make_model, **ALL)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(20000)
        file.write(bytes(20000))
    assert_same(loaded, model)
    loaded.save_pretrained(tmp_path)
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_tensors_of_other_sizes_start_anew_if_asked(make_model, tmp_path):
    model = trained(make_model, layer_pattern=["vq", "mamba2"])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, vocab_size=70, num_codes=9, ignore_mismatched_sizes=True
    )
    assert loaded.lm_head.weight.shape == (70, 32)
    assert 0.2 < loaded.lm_head.weight.std() < 0.4
    codebook = loaded.model.layers[0].mixer.key_codebook
    assert codebook.codes.shape == (2, 9, 8)
    assert codebook.codes.isfinite().all()
    assert codebook.health().live_codes.tolist() == [0, 0]
    other, expected = [], model.state_dict()
    for name, tensor in loaded.state_dict().items():
        if tensor.shape == expected[name].shape:
            assert tensor.equal(expected[name]), name
        else:
            other.append(name.rsplit(".", 1)[-1])
    assert sorted(other) == ["codes", "idle", "shares", "sums", "weight", "weight"]


def test_what_a_file_lacks_starts_anew_and_is_told(make_model, tmp_path):
    """One kind of tensor after the other, of mixers that have all kinds; the others are kept."""
    mixers = ["ovq", "vq_static_values", "gated_delta_net", "mamba2", "mesa_net"]
    model = trained(make_model, layer_pattern=mixers, num_hidden_layers=5)
    state = model.state_dict()
    for kind in sorted({name.rsplit(".", 2)[-1 if "mixer" in name else -2] for name in state}):
        kept = {n: t for n, t in state.items() if f".{kind}" not in f".{n}"}
        loaded, told = OVQForCausalLM.from_pretrained(
            None, config=model.config, state_dict=kept, output_loading_info=True
        )
        assert set(told["missing_keys"]) == state.keys() - kept.keys() != set(), kind
        for name, tensor in loaded.state_dict().items():
            assert tensor.isfinite().all(), name
            assert tensor.abs().max() < 100.5, name  # not what the memory happened to hold
            assert tensor.equal(state[name]) == (name in kept), name
