"""A converted model is its source within what it holds, and says what it cannot be made of."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ovq.conversion import (
    LAYERS,
    Conversion,
    LayerPlan,
    convert,
    convert_to_run,
    converted_config,
    layer_fields,
    parse_pattern,
)
from ovq.conversion.distill import distill, divergence, windows
from ovq.loading import load_run, load_text_model
from ovq.models import OVQForCausalLM
from tests.conversion.conftest import make_source

TOKENS, FIRST, SHARE = 40, 2, 0.2
PATTERNS = [[name] for name in LAYERS] + [
    ["sliding_window_sinks", "windowed_ovq", "full_attention"]
]
by_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=lambda names: "-".join(names))


def converted(source, pattern):
    layers = [
        LayerPlan(name=name, tokens=None if name == "full_attention" else TOKENS)
        for name in pattern
    ]
    config = converted_config(
        source.config, layers, num_first_tokens=FIRST, share_of_slots=SHARE, distance=50
    )
    return convert(source, config)


def logits(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits


def tokens(num_tokens):
    return torch.randint(256, (num_tokens,), generator=torch.Generator().manual_seed(1))


@by_pattern
@pytest.mark.parametrize("tied", [True, False])
def test_equals_its_source_within_what_it_holds(pattern, tied):
    source = make_source(tie_word_embeddings=tied)
    model, ids = converted(source, pattern), tokens(200)
    assert model.num_parameters() - source.num_parameters() == 4 * (
        model.config.mixer_names.count("windowed_ovq")
    )
    ours, theirs = logits(model, ids), logits(source, ids)
    exact = 200 if pattern == ["full_attention"] else TOKENS
    if "windowed_ovq" in pattern:
        dictionary = model.config.for_layer(pattern.index("windowed_ovq")).dictionary
        exact = FIRST + dictionary["window_size"] + dictionary["chunk_size"]
    torch.testing.assert_close(ours[:, :exact], theirs[:, :exact], atol=1e-4, rtol=1e-4)
    if exact < 200:  # of so many tokens some are lost
        assert (ours - theirs)[:, 2 * TOKENS :].abs().mean() > 1e-3


@by_pattern
def test_every_layer_holds_as_many_bytes(pattern):
    model = converted(make_source(), pattern)
    per_token, counts = 2 * 2 * 8 * 4, 40
    for layer in model.model.layers:
        held = layer.mixer.state_size(10**4)
        if type(layer.mixer).__name__ == "FullAttention":
            continue
        assert (TOKENS - 1) * per_token < held <= TOKENS * per_token + counts


def test_weights_are_the_sources():
    source = make_source()
    model = converted(source, ["windowed_ovq"])
    theirs = source.model.layers[1].self_attn.k_proj.weight
    ours = model.model.layers[1].mixer.k_proj.weight
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() != theirs.data_ptr()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias among"),
        ({"mlp_bias": True}, "mlp_bias among"),
        ({"hidden_act": "gelu"}, "hidden_act among"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
            "plain rotary positions, got rope_type 'linear'",
        ),
    ],
)
def test_sources_of_another_type_are_refused(changes, message):
    source = make_source(**changes)
    with pytest.raises(ValueError, match=message):
        converted(source, ["full_attention"])


def test_weights_of_another_type_are_refused():
    source = make_source()
    source.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(48))
    with pytest.raises(ValueError, match="weights of a Llama-type model, got model"):
        converted(source, ["full_attention"])


@pytest.mark.plain
def test_patterns():
    def read(text):
        return [(layer.name, layer.tokens) for layer in parse_pattern(text, 64)]

    assert read("full_attention") == [("full_attention", None)]
    assert read("windowed_ovq*2, sliding_window_sinks:256") == [
        ("windowed_ovq", 64), ("windowed_ovq", 64), ("sliding_window_sinks", 256),
    ]  # fmt: skip
    for text in (
        "", "ovq", "full_attention*0", "full_attention*x", "full_attention,,", "full_attention:9",
        "windowed_ovq:0", "windowed_ovq*2:9",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="pattern must hold the mixers full_attention, sl"):
            read(text)


@pytest.mark.plain
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("tokens", [30, 64, 500, 2048])
def test_sizes_fill_what_is_given(tokens, share):
    plan = LayerPlan(name="windowed_ovq", tokens=tokens)
    fields = layer_fields(plan, num_first_tokens=3, share_of_slots=share, head_dim=8)["dictionary"]
    slots = fields["num_centroids"] * 9 / 8
    exact = 3 + fields["window_size"] + fields["chunk_size"]
    assert tokens - 1.2 <= exact + slots <= tokens
    assert abs(slots - share * tokens) <= fields["chunk_size"] + 2


@pytest.mark.plain
def test_sizes_that_are_too_small():
    for name, few, first in (
        ("windowed_ovq", 6, 4), ("sliding_window_sinks", 4, 4), ("windowed_ovq", TOKENS, -1),
    ):  # fmt: skip
        plan = LayerPlan(name=name, tokens=few)
        with pytest.raises(ValueError, match=f"tokens must be enough .* {few} for {name}"):
            layer_fields(plan, num_first_tokens=first, share_of_slots=0.2, head_dim=8)
    layers = [LayerPlan(name="full_attention", tokens=None)] * 4
    with pytest.raises(ValueError, match="at most the 3 layers of SOURCE, got 4"):
        converted_config(make_source().config, layers)


def test_layers_of_unlike_sizes():
    layers = parse_pattern("windowed_ovq:60, sliding_window_sinks:20, sliding_window:30", 0)
    source = make_source()
    model = convert(source, converted_config(source.config, layers, num_first_tokens=FIRST))
    per_token = 2 * 2 * 8 * 4
    for layer, held in zip(model.model.layers, (60, 20, 30), strict=True):
        size = layer.mixer.state_size(10**4)
        assert (held - 1.5) * per_token < size <= held * per_token + 40
    model.set_dictionary(num_centroids=5)
    assert model.model.layers[0].mixer.dictionary.num_centroids == 5
    assert model.model.layers[0].mixer.dictionary.chunk_size > 1


def test_a_distillation_changes_the_biases_alone_and_comes_nearer():
    source = make_source()
    model = converted(source, ["windowed_ovq"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = tokens(300)
    steps = 6
    found = distill(
        model, source, iter([ids[:150]] * steps), num_steps=steps, first=TOKENS, learning_rate=0.3
    )
    assert len(found) == steps
    with torch.no_grad():
        assert divergence(model, source, ids[:150], TOKENS) < found[0]
    changed = {n for n, tensor in model.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {f"model.layers.{i}.mixer.dictionary_bias" for i in range(3)}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    with pytest.raises(ValueError, match="pattern must hold windowed_ovq for a distillation"):
        distill(converted(source, ["full_attention"]), source, iter([]), num_steps=1, first=1)


@pytest.mark.plain
def test_windows_are_spread_over_the_text():
    pieces = list(windows(torch.arange(100), 30, 3))
    assert [piece[0].item() for piece in pieces] == [0, 35, 70]
    assert all(len(piece) == 30 for piece in pieces)
    with pytest.raises(ValueError, match="text must have at least 101 tokens, got 100"):
        next(windows(torch.arange(100), 101, 1))


def test_a_run_of_a_converted_model(source_folder, texts, tmp_path):
    plan = Conversion(
        pattern="sliding_window_sinks,windowed_ovq", tokens=TOKENS, num_first_tokens=FIRST,
        distill_steps=2, distill_length=100, texts=str(texts),
    )  # fmt: skip
    steps = []
    run = convert_to_run(str(source_folder), plan, tmp_path / "run", lambda *s: steps.append(s))
    assert [step[:2] for step in steps] == [(1, 2), (2, 2)]
    assert run["divergences"] == [step[2] for step in steps]
    model, codec = load_text_model(tmp_path / "run")
    assert codec.decode(codec.encode("a line of text\n")) == "a line of text\n"
    biases = model.model.layers[1].mixer.dictionary_bias
    assert biases.abs().min() > 0
    source = AutoModelForCausalLM.from_pretrained(source_folder)
    ids = codec.encode("it was the best of times")
    torch.testing.assert_close(logits(model, ids), logits(source, ids), atol=1e-4, rtol=1e-4)
    assert isinstance(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), OVQForCausalLM
    )  # fmt: skip
    with pytest.raises(ValueError, match="must have been trained by `ovq train`, got the conv"):
        load_run(tmp_path / "run")

    steps.clear()
    again = convert_to_run(str(source_folder), plan, tmp_path / "run", lambda *s: steps.append(s))
    assert (again, steps) == (run, [])
    with pytest.raises(ValueError, match="without a run of another configuration"):
        convert_to_run(str(source_folder), Conversion(pattern="windowed_ovq"), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("")
    with pytest.raises(ValueError, match="--output must be a new or empty folder"):
        convert_to_run(str(source_folder), plan, tmp_path / "other")


@pytest.mark.plain
def test_a_plan_that_does_not_fit():
    with pytest.raises(ValueError, match="distill_steps must be above 0 with texts"):
        Conversion(pattern="windowed_ovq", distill_steps=3)
    with pytest.raises(ValueError, match="distill_length must be more than the 1,024 tokens"):
        Conversion(
            pattern="windowed_ovq", distill_steps=3, texts="books", distill_length=1024
        )  # fmt: skip
