"""The configuration: what it fills in, what it keeps through a file, what it refuses."""

import subprocess
import sys

import pytest
from transformers import AutoConfig

from ovq.models import OVQConfig


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
        ({"window_size": 0}, "window_size must be an integer of at least 1, got 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite .* got nan"),
        ({"rope_theta": 0}, "rope_theta must be above 0, got 0"),
        ({"rope_theta": True}, "rope_theta must be finite .* got True"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be finite and not negative, got -1e-06"),
        ({"vocab_size": True}, "vocab_size must be an integer of at least 1, got True"),
        ({"vocab_size": "8"}, "vocab_size must be an integer of at least 1, got '8'"),
        ({"dictionary": {"num_centroids": 0, "chunk_size": 4}}, "num_centroids .* got 0"),
        ({"dictionary": {"num_centroids": 4}}, "dictionary must hold .*chunk_size"),
        ({"dictionary": {"num_slots": 4, "chunk_size": 4}}, "dictionary must hold .*num_slots"),
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
