"""The configuration: what it fills in, what it keeps through a file, what it refuses."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ovq.models import OVQConfig


@pytest.fixture
def saved(tmp_path):
    """A function from changed fields to a folder with a configuration, as another might save it."""

    def save(**changes):
        OVQConfig(num_hidden_layers=1, hidden_size=64).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return tmp_path

    return save


def test_pattern_is_repeated_over_the_layers():
    config = OVQConfig(num_hidden_layers=5, layer_pattern=["sliding_window", "full_attention"])
    assert config.mixer_names == ["sliding_window", "full_attention"] * 2 + ["sliding_window"]


def test_derived_fields():
    config = OVQConfig(hidden_size=96, num_attention_heads=6)
    assert (config.num_key_value_heads, config.head_dim) == (6, 16)
    assert config.dictionary["growth"] == "saturating"


def test_file_round_trip(tmp_path):
    config = OVQConfig(
        layer_pattern=["ovq"], dictionary={"num_centroids": 7, "chunk_size": 3}, window_size=9
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is OVQConfig
    kept = ("layer_pattern", "dictionary", "window_size", "num_key_value_heads", "head_dim")
    kept += ("rope_theta", "max_position_embeddings", "tie_word_embeddings", "vocab_size")
    assert [getattr(loaded, name) for name in kept] == [getattr(config, name) for name in kept]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_pattern": ["mamba9"]}, r"layer_pattern must be one of .*'ovq'.* got 'mamba9'"),
        ({"layer_pattern": []}, r"layer_pattern must be a list of at least one mixer, got \[\]"),
        ({"layer_pattern": "ovq"}, "layer_pattern must be a list of at least one mixer, got 'ovq'"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads must divide num_attention_heads 8, got 3",
        ),
        ({"num_attention_heads": 7}, "num_attention_heads must divide hidden_size 512 .* got 7"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        (
            {"num_identity_layers": 9},
            "num_identity_layers must be .* 0 to num_hidden_layers 8, got 9",
        ),
        ({"num_identity_layers": True}, "num_identity_layers must be an integer .* got True"),
        ({"window_size": 0}, "window_size must be an integer of at least 1, got 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite .* got nan"),
        ({"initial_beta": 0}, "initial_beta must be finite and above 0, got 0"),
        ({"initial_beta": float("inf")}, "initial_beta must be finite and above 0, got inf"),
        ({"initial_beta": True}, "initial_beta must be finite and above 0, got True"),
        ({"ssmax_length": 1}, "ssmax_length must be an integer of at least 2, or none, got 1"),
        ({"ssmax_length": True}, "ssmax_length must be an integer .* got True"),
        (
            {"ssmax_length": 128, "layer_pattern": ["mamba2"]},
            r"ssmax_length must be none unless .*'ovq'.* got \['mamba2'\]",
        ),
        ({"initial_decay_rate": 0}, "initial_decay_rate must be finite and above 0, got 0"),
        ({"initial_decay_rate": "1"}, "initial_decay_rate must be finite and above 0, got '1'"),
        ({"rope_theta": 0}, "rope_theta must be above 0, got 0"),
        ({"rope_theta": True}, "rope_theta must be finite .* got True"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be finite and not negative, got -1e-06"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
        ({"vocab_size": "8"}, "vocab_size must be an integer of at least 1, got '8'"),
        ({"dictionary": {"num_centroids": 0, "chunk_size": 4}}, "num_centroids .* got 0"),
        ({"dictionary": {"num_centroids": 4}}, "dictionary must hold chunk_size, got .*centroids"),
        (
            {"dictionary": {"num_slots": 4, "chunk_size": 4}},
            "dictionary must hold no fields but .*'num_centroids'.* got 'num_slots': misspelt, or",
        ),
        ({"dictionary": None}, "dictionary must hold fields by name, got None"),
        ({"layer_pattern": [["ovq"]]}, r"layer_pattern must be a list .* got \[\['ovq'\]\]"),
        ({"use_short_conv": "no"}, "use_short_conv must be true or false, got 'no'"),
        (
            {"use_short_conv": True, "layer_pattern": ["full_attention", "sliding_window"]},
            r"use_short_conv must be false unless .*'mamba2'.* got \['full_attention', 'sliding_",
        ),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        OVQConfig(**fields)
    assert "\n" not in str(caught.value)


def test_without_transformers_the_import_says_what_to_install():
    code = "import sys; sys.modules['transformers'] = None; import ovq.models"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError: ovq.models needs transformers: pip install 'ovq[models]'" in run.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_pattern": ["ovq", "mamba9"]}, "must be one of .*'sliding_window'.* got 'mamba9'"),
        (
            {"dictionary": {"num_centroids": 4, "chunk_size": 4, "merging": "late"}},
            "no fields but .* got 'merging': misspelt, or of a model that a newer ovq saved",
        ),
        pytest.param(
            {"dictionary": {"num_centroids": 4, "chunk_size": 4, "growth": "cubic"}},
            "growth must be one of .* got 'cubic'",
            marks=pytest.mark.plain,
        ),
    ],
)
def test_a_file_that_this_version_cannot_read_says_so(saved, fields, message):
    folder = saved(**fields)
    for auto in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=message) as caught:
            auto.from_pretrained(folder)
        assert "\n" not in str(caught.value)


def test_fields_given_with_a_file_are_checked_like_its_own(saved):
    folder = saved()
    changed = AutoConfig.from_pretrained(
        folder, window_size=7, dictionary={"num_centroids": 5}, head_dim=None, hidden_size=128
    )
    assert (changed.window_size, changed.head_dim) == (7, 16)
    assert changed.dictionary == OVQConfig().dictionary | {"num_centroids": 5}
    _, unused = AutoConfig.from_pretrained(folder, window_size=7, foo=3, return_unused_kwargs=True)
    assert unused == {"foo": 3}
    for fields in ({"layer_pattern": ["mamba9"]}, {"window_size": 0}, {"dictionary": {"slots": 1}}):
        with pytest.raises(ValueError, match="must"):
            AutoConfig.from_pretrained(folder, **fields)


def test_unknown_fields_are_told_once_and_kept(saved, caplog):
    AutoConfig.from_pretrained(saved(auto_map={}, torch_dtype="float32", temperature=2.0))
    OVQConfig(num_labels=3, output_hidden_states=True, attn_implementation="eager")
    assert caplog.messages == []
    assert AutoConfig.from_pretrained(saved(logit_cap=3.0)).logit_cap == 3.0
    OVQConfig(windows_size=3)
    assert len(caplog.messages) == 2
    assert "no fields ['logit_cap'], which have no effect" in caplog.messages[0]
    assert "no fields ['windows_size'], which have no effect" in caplog.messages[1]


def test_a_field_set_out_of_its_range_is_not_saved(tmp_path):
    config = OVQConfig()
    for name, value in (("window_size", 0), ("dictionary", {"chunk_size": 4})):
        changed = copy.deepcopy(config)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=f"{name} must"):
            changed.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_copies_are_equal_and_of_their_own():
    pattern = ["ovq"]
    config = OVQConfig(layer_pattern=pattern, dictionary={"num_centroids": 7, "chunk_size": 3})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        other.dictionary["num_centroids"] = 8
        other.layer_pattern.append("vq")
        assert other != config
    assert (config.layer_pattern, config.dictionary["num_centroids"]) == (["ovq"], 7)
    config.layer_pattern.append("vq")
    assert pattern == ["ovq"]
    assert OVQConfig().layer_pattern == ["sliding_window", "ovq"]


LAYERS = [{"window_size": 9}, {"dictionary": {"num_centroids": 5}, "num_first_tokens": 1}, {}]


def test_layers_have_fields_of_their_own(tmp_path):
    config = OVQConfig(
        num_hidden_layers=5, window_size=7, layer_fields=LAYERS,
        dictionary={"num_centroids": 3, "chunk_size": 2},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    for same in (config, AutoConfig.from_pretrained(tmp_path), copy.deepcopy(config)):
        assert same.layer_fields == LAYERS
        assert [same.for_layer(i).window_size for i in range(5)] == [9, 7, 7, 9, 7]
        assert [same.for_layer(i).num_first_tokens for i in range(5)] == [4, 1, 4, 4, 1]
        dictionaries = [same.for_layer(i).dictionary for i in range(5)]
        assert [d["num_centroids"] for d in dictionaries] == [3, 5, 3, 3, 5]
        assert {d["chunk_size"] for d in dictionaries} == {2}
    assert (config.window_size, config.dictionary["num_centroids"]) == (7, 3)
    assert OVQConfig().for_layer(3) == OVQConfig()


def test_a_model_is_made_and_changed_layer_by_layer():
    fields = [{"window_size": 9}, {}, {}, {"dictionary": {"num_centroids": 5}}]
    config = OVQConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_hidden_layers=4, layer_pattern=["sliding_window", "ovq"], layer_fields=fields,
        dictionary={"num_centroids": 3, "chunk_size": 2},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    mixers = [layer.mixer for layer in model.model.layers]
    assert [mixers[0].window_size, mixers[2].window_size] == [9, 128]
    assert [mixers[i].dictionary.num_centroids for i in (1, 3)] == [3, 5]
    model.set_dictionary(chunk_size=4)
    assert [mixers[i].dictionary.num_centroids for i in (1, 3)] == [3, 5]
    assert [mixers[i].dictionary.chunk_size for i in (1, 3)] == [4, 4]
    with pytest.raises(ValueError, match=r"num_centroids .* got 0"):
        model.set_dictionary(num_centroids=0)
    model.set_dictionary(num_centroids=7)
    assert [mixers[i].dictionary.num_centroids for i in (1, 3)] == [7, 7]
    again = AutoModelForCausalLM.from_config(model.config)
    assert again.state_size(100) == model.state_size(100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_size": 9}, "layer_fields must be a list of fields by name"),
        ([3], "layer_fields must be a list of fields by name"),
        ([{"hidden_size": 4}], "layer_fields must hold fields among .* got 'hidden_size'"),
        ([{}, {"window_size": 0}], "window_size must be an integer of at least 1, got 0"),
        ([{"num_first_tokens": -1}], "num_first_tokens must be an integer of at least 0, got -1"),
        ([{"dictionary": {"slots": 1}}], "dictionary must hold no fields but"),
        ([{"dictionary": 3}], "dictionary must hold fields by name, got 3"),
    ],
)
def test_layer_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        OVQConfig(layer_fields=fields)
