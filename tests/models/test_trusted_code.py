"""A folder saved for ``trust_remote_code`` loads where nothing of ours was imported."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from ovq.models import OVQConfig, OVQForCausalLM, OVQModel

LOAD = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

folder = sys.argv[1]
assert not any(name.startswith("ovq") for name in sys.modules)
try:
    AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    print(error)
assert not any(name.startswith("ovq") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
print(model(torch.arange(10)[None]).logits.double().sum().item())

from ovq.models import OVQConfig, OVQForCausalLM, OVQModel
assert type(model) is OVQForCausalLM
assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is OVQConfig
assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)) is OVQModel
assert type(AutoModelForCausalLM.from_pretrained(folder)) is OVQForCausalLM
"""


@pytest.fixture
def registered(monkeypatch):
    """What a user does to save a model with code; taken back, for it holds for the process."""
    monkeypatch.setattr(OVQForCausalLM, "_auto_class", None)
    monkeypatch.setattr(OVQModel, "_auto_class", None)
    monkeypatch.setattr(OVQConfig, "_auto_class", None)
    OVQForCausalLM.register_for_auto_class("AutoModelForCausalLM")


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.usefixtures("registered")
def test_loads_in_a_process_without_the_import(make_model, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path / "m")
    assert {"modeling_ovq.py", "configuration_ovq.py"} < names(tmp_path / "m")
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "m")],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "pass the argument `trust_remote_code=True`" in run.stdout
    expected = model(torch.arange(10)[None]).logits.double().sum().item()
    # The other process may have more threads, and so round otherwise.
    assert float(run.stdout.splitlines()[-1]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("registered")
def test_the_files_hold_an_import_and_no_copy(make_model, tmp_path):
    """Both ways to register, alone and together; and saved again after a load without trust."""
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    OVQConfig.register_for_auto_class()
    model.save_pretrained(tmp_path / "both")
    OVQConfig(hidden_size=64).save_pretrained(tmp_path / "config")
    OVQConfig._auto_class = OVQForCausalLM._auto_class = None
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    for name in ("model", "both", "config", "again"):
        auto_map = json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        assert auto_map["AutoConfig"] == "configuration_ovq.OVQConfig"
        assert name == "config" or auto_map["AutoModelForCausalLM"] == "modeling_ovq.OVQForCausalLM"
        for reference in auto_map.values():
            code = (tmp_path / name / f"{reference.split('.')[0]}.py").read_text()
            assert "from ovq.models import OVQConfig, OVQForCausalLM, OVQModel" in code
            assert len(code.splitlines()) == 3


def test_no_code_unless_registered(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    assert names(tmp_path) == {"config.json", "generation_config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
