"""One file format for every state: whatever is in it comes back, or an error says why not."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from ovq.ops.state_file import FORMAT_VERSION, StateFile, digest, is_state_file, state_classes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Plain values of every kind."""

    size: int
    step: float
    rule: str
    length: int | None
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Tensors and settings."""

    means: Tensor
    counts: Tensor
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A state within a state."""

    memory: Inner
    inputs: Tensor


CLASSES = (Outer, Inner, Settings)
SETTINGS = Settings(size=3, step=0.1 + 0.2, rule="näher", length=None, exact=True)


def make_state(dtype=torch.float32) -> Outer:
    means = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    inner = Inner(means=means, counts=torch.arange(3), settings=SETTINGS)
    return Outer(memory=inner, inputs=torch.zeros(2, 0, 0, dtype=dtype))


def tensors_of(state: Outer) -> tuple[Tensor, ...]:
    return state.memory.means, state.memory.counts, state.inputs


def written(path, states=None, about=None) -> tuple[dict, dict]:
    """The tensors and the metadata of a file."""
    StateFile(states=states or (make_state(),), about=about or {}).save(path)
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata()


def forge(path, tensors: dict, metadata: dict) -> None:
    """A file whose digest is right, whatever it holds."""
    metadata = metadata | {"digest": digest(tensors, metadata)}
    safetensors.save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_come_back_to_the_bit(tmp_path, dtype):
    state, about = make_state(dtype), {"texts": ["a", "b"], "share": 1 / 3}
    extra = {"logits": torch.tensor([float("nan"), -0.0, float("inf")])}
    StateFile(states=(state, SETTINGS, state), about=about, tensors=extra).save(tmp_path / "f")
    found = StateFile.load(tmp_path / "f", CLASSES)
    assert found.about == about
    assert found.states[1] == SETTINGS
    for one in (found.states[0], found.states[2]):
        assert one.memory.settings == SETTINGS
        for loaded, saved in zip(tensors_of(one), tensors_of(state), strict=True):
            assert loaded.dtype == saved.dtype
            assert loaded.shape == saved.shape
            assert loaded.view(torch.uint8).equal(saved.view(torch.uint8))
    assert found.tensors["logits"].view(torch.int32).equal(extra["logits"].view(torch.int32))


def test_tensors_in_one_memory_in_a_graph_and_not_contiguous_can_be_saved(tmp_path):
    shared = torch.randn(3, 4)
    tracked = torch.randn(3, requires_grad=True) * 2
    inner = Inner(means=shared.T, counts=shared[1:], settings=SETTINGS)
    StateFile(states=(Outer(memory=inner, inputs=tracked),)).save(tmp_path / "f")
    (state,) = StateFile.load(tmp_path / "f", CLASSES).states
    assert state.memory.means.equal(shared.T)
    assert state.memory.counts.equal(shared[1:])
    assert state.inputs.equal(tracked)
    assert not state.inputs.requires_grad


def test_the_digest_is_of_the_content(tmp_path):
    digests = [written(tmp_path / name)[1]["digest"] for name in ("a", "b")]
    assert digests[0] == digests[1]
    other = written(tmp_path / "b", about={"num_tokens": [7]})[1]["digest"]
    assert other != digests[0]
    assert written(tmp_path / "b", states=(make_state(torch.float64),))[1]["digest"] != digests[0]


def test_state_classes_are_those_within_too():
    assert state_classes(make_state()) == set(CLASSES)


@pytest.mark.plain
@pytest.mark.parametrize("value", [[1], (1,), {"a": 1}, b"x", torch.float32])
def test_what_json_would_change_is_refused(tmp_path, value):
    settings = Settings(size=value, step=0.1, rule="", length=None, exact=True)
    with pytest.raises(ValueError, match=r"states must hold .* got \w+ in states\.0\.size"):
        StateFile(states=(settings,)).save(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_byte_is_an_error_wherever_it_is(tmp_path):
    path = tmp_path / "f"
    written(path, about={"num_tokens": [7]})
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        altered = bytearray(whole)
        altered[place] ^= 0x01 if place % 2 else 0xFF
        path.write_bytes(altered)
        with pytest.raises(ValueError, match="path must"):
            StateFile.load(path, CLASSES)


def test_a_truncated_file_is_an_error(tmp_path):
    path = tmp_path / "f"
    written(path)
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 31), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="path must"):
            StateFile.load(path, CLASSES)


@pytest.mark.parametrize(
    ("version", "advice"),
    [(FORMAT_VERSION + 1, "update ovq"), (FORMAT_VERSION - 1, "make it anew"), ("x", "update")],
)
def test_another_version_says_what_to_do(tmp_path, version, advice):
    path = tmp_path / "f"
    tensors, metadata = written(path)
    forge(path, tensors, metadata | {"version": str(version)})
    with pytest.raises(ValueError, match=f"version {FORMAT_VERSION}, got .*{version}.*{advice}"):
        StateFile.load(path, CLASSES)
    assert is_state_file(path)


def without(described: str, *names: str) -> str:
    """A description that lacks fields of the innermost state."""
    states = json.loads(described)
    for name in names:
        del states[0]["fields"]["memory"]["fields"][name]
    return json.dumps(states)


@pytest.mark.plain
@pytest.mark.parametrize(
    "kind",
    [
        "no json", "a number", "a class of Python", "a class of another state", "fewer fields",
        "more fields", "fewer tensors", "more tensors", "about a list", "no about",
    ],
)  # fmt: skip
def test_a_forged_file_makes_nothing(tmp_path, kind):
    path = tmp_path / "f"
    tensors, metadata = written(path)
    described, means = metadata["states"], "states.0.memory.means"
    fewer = {name: tensor for name, tensor in tensors.items() if name != means}
    without_about = {name: text for name, text in metadata.items() if name != "about"}
    tensors, metadata = {
        "no json": (tensors, metadata | {"states": "[{"}),
        "a number": (tensors, metadata | {"states": "7"}),
        "a class of Python": (
            tensors,
            metadata | {"states": described.replace('"Settings"', '"list"')},
        ),
        "a class of another state": (
            tensors,
            metadata | {"states": described.replace('"Settings"', '"Inner"')},
        ),
        "fewer fields": (tensors, metadata | {"states": without(described, "settings")}),
        "more fields": (
            tensors,
            metadata | {"states": described.replace('"means":', '"more": {"value": 1}, "means":')},
        ),
        "fewer tensors": (fewer, metadata),
        "more tensors": (tensors | {"states.0.memory.more": torch.zeros(1)}, metadata),
        "about a list": (tensors, metadata | {"about": "[]"}),
        "no about": (tensors, without_about),
    }[kind]
    forge(path, tensors, metadata)
    with pytest.raises(ValueError, match=r"path must .*f") as error:
        StateFile.load(path, CLASSES)
    assert "\n" not in str(error.value)


def test_files_of_others_and_folders(tmp_path):
    weights = tmp_path / "model.safetensors"
    safetensors.save_file({"weight": torch.ones(3)}, weights)
    text = tmp_path / "book.txt"
    text.write_text("In the beginning")
    for path in (weights, text, tmp_path):
        assert not is_state_file(path)
        with pytest.raises(ValueError, match=f"path must .*{path}"):
            StateFile.load(path, CLASSES)
    with pytest.raises(ValueError, match="path must be a file, got the folder"):
        StateFile(states=()).save(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside(tmp_path, monkeypatch):
    path = tmp_path / "f"
    written(path)
    before = path.read_bytes()

    def out_of_space(tensors, filename, metadata=None):
        filename.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors, "save_file", out_of_space)
    with pytest.raises(OSError, match=r"f cannot be written: .*No space left"):
        StateFile(states=(make_state(),)).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_bytes() == before
