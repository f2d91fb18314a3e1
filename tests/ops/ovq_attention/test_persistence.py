"""States on disk: back bit for bit, and never half of one."""

import sys
from dataclasses import replace

import pytest
import torch

from ovq import OVQState
from ovq.ops.state_file import digest

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    assert_bits_equal,
    make_config,
    make_inputs,
    phased_state,
    run,
    state_bits,
)

safetensors = pytest.importorskip("safetensors.torch")

COUNTS = "states.0.counts"


@pytest.fixture(params=["constant-unit-linear", "window-random-direction"])
def state(request) -> OVQState:
    """Rows at unlike phases, one of them without a past."""
    return phased_state(make_config(**VARIANTS[request.param]), (0, 3, 18))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_loaded_state_goes_on_as_the_saved_one(impl, state, tmp_path):
    path = tmp_path / "state.safetensors"
    state.save(path)
    loaded = OVQState.load(path)
    assert loaded.dictionary == state.dictionary
    assert_bits_equal(state_bits(loaded), state_bits(state))
    inputs = make_inputs(3, 11)
    o, after, _ = run(inputs, state.dictionary, impl, loaded)
    o_direct, after_direct, _ = run(inputs, state.dictionary, impl, state)
    assert torch.equal(o, o_direct)
    assert_bits_equal(state_bits(after), state_bits(after_direct))


def test_a_state_in_a_graph_and_one_of_picked_rows_can_be_saved(state, tmp_path):
    path = str(tmp_path / "state.safetensors")
    tracked = state.map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x)
    picked = tracked.select_rows(torch.tensor([2, 2, 0]))
    picked.save(path)
    loaded = OVQState.load(path)
    assert_bits_equal(state_bits(loaded), state_bits(picked))
    assert not loaded.key_means.requires_grad


def test_saving_leaves_one_file_and_replaces_the_old_one(state, tmp_path):
    path = tmp_path / "state.safetensors"
    state.save(path)
    newer = state.select_rows(torch.tensor([2]))
    newer.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert_bits_equal(state_bits(OVQState.load(path)), state_bits(newer))


def test_an_interrupted_write_leaves_the_old_file(state, tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    state.save(path)

    def stopped(tensors, filename, metadata=None):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors, "save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        state.select_rows(torch.tensor([2])).save(path)
    assert_bits_equal(state_bits(OVQState.load(path)), state_bits(state))


def test_a_path_that_cannot_be_written_is_named(state, tmp_path):
    missing = tmp_path / "nowhere/state.safetensors"
    with pytest.raises(ValueError, match=f"path must lie in an existing folder, got {missing}"):
        state.save(missing)
    with pytest.raises(ValueError, match=f"path must be a file, got the folder {tmp_path}"):
        state.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        OVQState.load(missing)


def test_without_safetensors_the_error_says_what_to_install(state, tmp_path, monkeypatch):
    state.save(tmp_path / "state")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (state.save, OVQState.load):
        with pytest.raises(ImportError, match=r"safetensors: pip install 'ovq\[models\]'"):
            call(tmp_path / "state")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_truncated_file_raises(state, tmp_path, kept):
    path = tmp_path / "state.safetensors"
    state.save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"path .*state\.safetensors"):
        OVQState.load(path)


@pytest.mark.parametrize(
    "content", [b"In the beginning God created", b"\xff" * 4096, b"{}" * 50], ids=["a", "b", "c"]
)
def test_a_file_of_another_format_raises(tmp_path, content):
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path .*book\.txt"):
        OVQState.load(path)


def misfits(tensors: dict, metadata: dict) -> dict[str, tuple[dict, dict | None]]:
    """Files in the right format that are no state of ours."""
    counts, means = tensors[COUNTS], tensors["states.0.key_means"]
    fewer = {name: x for name, x in tensors.items() if name != COUNTS}
    version = next(key for key in metadata if "version" in key)
    rest = {key: text for key, text in metadata.items() if key != version}
    dictionary = "states"
    return {
        "model weights": ({"weight": torch.ones(3)}, None),
        "saved by transformers": ({"weight": torch.ones(3)}, {"format": "pt"}),
        "no metadata": (tensors, None),
        "newer version": (tensors, metadata | {version: "999"}),
        "version no number": (tensors, metadata | {version: "one"}),
        "no version": (tensors, rest),
        "dictionary lacks fields": (tensors, metadata | {dictionary: "{}"}),
        "dictionary no json": (tensors, metadata | {dictionary: "not json"}),
        "tensor missing": (fewer, metadata),
        "tensor of another name": (fewer | {"number": counts}, metadata),
        "tensor too many": (tensors | {"number": counts.clone()}, metadata),
        "other N": (tensors | {COUNTS: counts[:, :, :-1].contiguous()}, metadata),
        "other dtype": (tensors | {COUNTS: counts.float()}, metadata),
        "other rank of value_means": (
            tensors | {"states.0.value_means": means[0].clone()},
            metadata,
        ),
        "other rank of key_means": (tensors | {"states.0.key_means": means[0].clone()}, metadata),
    }


@pytest.mark.parametrize(
    "kind",
    misfits(
        {COUNTS: torch.ones(1, 1, 1), "states.0.key_means": torch.ones(1)},
        {"version": "", "states": "{}"},
    ),
)
@pytest.mark.plain
def test_other_safetensors_files_raise(state, tmp_path, kind):
    path = tmp_path / "other.safetensors"
    state.save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, tensors = (
            file.metadata(),
            {name: file.get_tensor(name) for name in list(file.keys())},
        )
    contents, about = misfits(tensors, metadata)[kind]
    if about is not None and "digest" in about:  # whoever altered it knew how
        about = about | {"digest": digest(contents, about)}
    safetensors.save_file(contents, path, metadata=about)
    with pytest.raises(ValueError, match=r"path .*other\.safetensors"):
        OVQState.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_active", 99), ("num_active", -3), ("tail_length", 99), ("tail_length", -1),
        ("num_absorbed", -7), ("counts", -1), ("counts", 0), ("key_means", float("nan")),
    ],
)  # fmt: skip
def test_numbers_no_state_can_hold_are_an_error(tmp_path, field, value):
    config = make_config(num_centroids=8, chunk_size=4)
    _, state, _ = run(make_inputs(T=11), config, "torch")
    wrong = torch.full_like(getattr(state, field), value)
    replace(state, **{field: wrong}).save(tmp_path / "state")
    with pytest.raises(ValueError, match="path must hold"):
        OVQState.load(tmp_path / "state")
