"""A memory on disk: going on from the file is going on from memory, and of no other model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ovq import OVQState
from ovq.layers import MIXERS
from ovq.models import OVQCache
from ovq.models.cache import CACHE_FIELD
from ovq.models.state_file import Fingerprint
from ovq.ops.state_file import digest, state_classes

PATTERNS = [[name] for name in MIXERS] + [["sliding_window", "ovq"], ["mamba2", "full_attention"]]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def reread(tmp_path):
    """A function from a cache to the same out of a file."""

    def through_a_file(cache, model) -> OVQCache:
        cache.save(tmp_path / "memory.state", model=model)
        return OVQCache.load(tmp_path / "memory.state", model=model)

    return through_a_file


@torch.no_grad()
def read(model, token_ids, mask=None, cache=None):
    """Logits and memory."""
    return model(token_ids, attention_mask=mask, cache=cache, use_cache=True, return_dict=False)[:2]


def bits(cache: OVQCache) -> list[torch.Tensor]:
    """All tensors of a cache, bit by bit."""

    def tensors(state):
        for name in state.__dataclass_fields__:
            value = getattr(state, name)
            if isinstance(value, torch.Tensor):
                yield value.reshape(-1).view(torch.uint8)
            elif hasattr(value, "__dataclass_fields__"):
                yield from tensors(value)

    return [tensor for state in cache.states for tensor in tensors(state)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_going_on_from_a_file_is_going_on_from_memory_to_the_bit(
    make_model, token_ids, reread, layer_pattern, dtype
):
    """Rows of unlike lengths, in one call and token by token."""
    model = make_model(layer_pattern=layer_pattern, use_short_conv=True).to(dtype)
    mask = torch.stack([torch.arange(23) >= start for start in (0, 9, 21)]).long()
    _, memory = read(model, token_ids, mask)
    before = bits(memory)
    loaded = reread(memory, model)
    assert all(a.equal(b) for a, b in zip(bits(loaded), before, strict=True))
    assert loaded.num_columns == 23
    for new in (token_ids[:, :7], token_ids[:, 7:8], token_ids[:, 8:9]):
        logits, loaded_after = read(model, new, cache=loaded)
        expected, memory = read(model, new, cache=memory)
        assert logits.equal(expected)
        assert all(a.equal(b) for a, b in zip(bits(loaded_after), bits(memory), strict=True))
        loaded = loaded_after


@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_beams_from_a_file_are_those_from_memory(make_model, token_ids, reread, layer_pattern):
    model = make_model(layer_pattern=layer_pattern)
    memory = read(model, token_ids)[1]
    loaded, before = reread(memory, model), bits(memory)
    found, expected, without = (
        model.generate(
            token_ids[:, :2], max_new_tokens=3, num_beams=2, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, **{CACHE_FIELD: cache.as_prefix()},
        )
        for cache in (loaded, memory, OVQCache())
    )  # fmt: skip
    assert found.sequences.equal(expected.sequences)
    assert found.sequences_scores.equal(expected.sequences_scores)
    assert not found.sequences_scores.equal(without.sequences_scores)
    assert all(a.equal(b) for a, b in zip(bits(loaded), before, strict=True))


def test_a_second_model_of_the_same_weights_goes_on(make_model, token_ids, reread, tmp_path):
    model = make_model()
    memory = read(model, token_ids)[1]
    loaded = reread(memory, model)
    model.save_pretrained(tmp_path / "model")
    other = type(model).from_pretrained(tmp_path / "model").eval()
    other.config.eos_token_id, other.config.max_position_embeddings = 7, 99
    again = OVQCache.load(tmp_path / "memory.state", model=other)
    assert read(other, token_ids, cache=again)[0].equal(read(model, token_ids, cache=loaded)[0])


def test_a_prefix_needs_the_new_tokens_alone(make_model, token_ids):
    model = make_model()
    whole = torch.cat([token_ids, token_ids[:, :4]], dim=1)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(whole, **options)[:, whole.shape[1] :]
    prefix = read(model, token_ids)[1].as_prefix()
    assert prefix.get_seq_length() == 0
    text = model.generate(token_ids[:, :4], **options, **{CACHE_FIELD: prefix})
    assert text[:, 4:].equal(expected)


def test_the_file_says_what_it_is(make_model, token_ids, tmp_path):
    model = make_model()
    memory = read(model, token_ids)[1]
    memory.save(tmp_path / "memory.state", model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["memory.state"]
    with safe_open(tmp_path / "memory.state", framework="pt") as file:
        metadata, names = file.metadata(), list(file.keys())
    assert metadata["format"] == "ovq-state"
    assert metadata["version"].isdecimal()
    about = json.loads(metadata["about"])
    assert about["num_tokens"] == [23] * 3
    assert about["model"]["weights"] == Fingerprint.of(model).weights
    for kind in set().union(*map(state_classes, memory.states)):
        assert f'"{kind.__name__}"' in metadata["states"]
    assert "states.1.memory.key_means" in names
    held = sum(x.numel() * x.element_size() for x in load_file(tmp_path / "memory.state").values())
    assert held == memory.num_bytes


OTHERS = {
    "a layer": ({"layer_pattern": ["ovq", "mamba2"]}, r"layer_pattern = \['sliding_window'"),
    "the window": ({"window_size": 6}, "window_size = 5, not 6"),
    "the codes": ({"num_codes": 8}, "num_codes = 7, not 8"),
    "the rotation": ({"rope_theta": 5e5}, "rope_theta = 10000.0, not 500000.0"),
    "the chunk": (
        {"dictionary": {"num_centroids": 6, "chunk_size": 5}},
        "dictionary.chunk_size = 4, not 5",
    ),
    "the weights": ({"initializer_range": 0.31}, "weights [0-9a-f]{12}, not [0-9a-f]{12}"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_state_of_another_model_is_refused(make_model, token_ids, tmp_path, what):
    changes, message = OTHERS[what]
    model = make_model()
    read(model, token_ids)[1].save(tmp_path / "memory.state", model=model)
    with pytest.raises(ValueError, match=f"path must hold a state of this model.*{message}") as e:
        OVQCache.load(tmp_path / "memory.state", model=make_model(**changes))
    assert "\n" not in str(e.value)


def test_one_weight_and_the_dictionary_make_another_model(make_model, token_ids, tmp_path):
    model, path = make_model(), tmp_path / "memory.state"
    read(model, token_ids)[1].save(path, model=model)
    model.set_dictionary(num_centroids=7)
    with pytest.raises(ValueError, match=r"dictionary\.num_centroids = 6, not 7"):
        OVQCache.load(path, model=model)
    model.set_dictionary(num_centroids=6)
    OVQCache.load(path, model=model)
    for tensor in list(model.state_dict().values()):
        flat = tensor.view(-1)
        before = flat[-1].item()
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(1e9))
        with pytest.raises(ValueError, match="made with weights"):
            OVQCache.load(path, model=model)
        flat[-1] = before
    OVQCache.load(path, model=model)
    with pytest.raises(ValueError, match="made with weights"):
        OVQCache.load(path, model=model.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["truncated", "altered", "of an operator", "weights", "a text"])
def test_no_whole_state_of_a_model(make_model, token_ids, tmp_path, kind):
    model, path = make_model(), tmp_path / "memory.state"
    memory = read(model, token_ids)[1]
    memory.save(path, model=model)
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[:-1])
    if kind == "altered":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    if kind == "of an operator":
        memory.states[1].memory.save(path)
    if kind == "weights":
        save_file({"weight": torch.ones(3)}, path)
    if kind == "a text":
        path.write_text("In the beginning")
    with pytest.raises(ValueError, match=r"path must .*memory\.state") as error:
        OVQCache.load(path, model=model)
    assert "\n" not in str(error.value)


def test_a_forged_state_has_the_layers_of_the_model(make_model, token_ids, tmp_path):
    """Even with the right digest."""
    model, path = make_model(), tmp_path / "memory.state"
    memory = read(model, token_ids)[1]
    swapped = OVQCache(memory.states[::-1], 23)
    swapped.save(path, model=model)
    with pytest.raises(ValueError, match="path must hold one state a layer"):
        OVQCache.load(path, model=model)
    fewer = OVQCache([memory.states[0], memory.states[1].select_rows(torch.tensor([0]))][:1], 23)
    fewer.save(path, model=model)
    with pytest.raises(ValueError, match="path must hold one state a layer"):
        OVQCache.load(path, model=model)
    memory.save(path, model=model)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    metadata["states"] = metadata["states"].replace("OVQAttentionState", "ConvolvedState")
    tensors = load_file(path)
    save_file(tensors, path, metadata=metadata | {"digest": digest(tensors, metadata)})
    with pytest.raises(ValueError, match="path must"):
        OVQCache.load(path, model=model)


def test_a_model_state_is_no_operators_and_an_empty_one_none(make_model, token_ids, tmp_path):
    model = make_model()
    read(model, token_ids)[1].save(tmp_path / "memory.state", model=model)
    with pytest.raises(ValueError, match="path must"):
        OVQState.load(tmp_path / "memory.state")
    with pytest.raises(ValueError, match="cache must hold the state of every layer"):
        OVQCache().save(tmp_path / "empty.state", model=model)
    with pytest.raises(FileNotFoundError):
        OVQCache.load(tmp_path / "empty.state", model=model)


def test_fields_that_came_later_have_their_defaults(make_model):
    ours = Fingerprint.of(make_model(rope_theta=10000.0))
    dictionary = {name: ours.configuration["dictionary"][name] for name in ("num_centroids",)}
    dictionary["chunk_size"] = ours.configuration["dictionary"]["chunk_size"]
    older = {name: x for name, x in ours.configuration.items() if name != "rope_theta"}
    written = {"configuration": older | {"dictionary": dictionary}, "weights": ours.weights}
    assert ours.difference(written) is None
    other = Fingerprint.of(make_model(rope_theta=5.0))
    assert other.difference(written) == "rope_theta = 10000.0, not 5.0"
    newer = {"configuration": ours.configuration | {"twist": 3}, "weights": ours.weights}
    assert ours.difference(newer) == "twist = 3, not 'none'"
    for damaged in (None, {}, {"configuration": 3}, {"configuration": {"hidden_size": "x"}}):
        assert ours.difference(damaged) == "no fingerprint of a model"


def test_the_fingerprint_ignores_what_changes_no_state(make_model):
    model = make_model()
    before = Fingerprint.of(model)
    assert before == Fingerprint.of(make_model())
    model.train()
    model.config.use_cache, model.config.pad_token_id = False, 3
    assert Fingerprint.of(model) == before
    assert before.difference({"configuration": before.configuration, "weights": "0"}) is not None
    assert replace(before, weights="0") != before
