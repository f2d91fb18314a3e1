"""The page of `ovq inspect`: what stands on it is what the model does, and nothing leaves it."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from typer.testing import CliRunner

from ovq import inspection
from ovq.cli import app
from ovq.inspection import inspect, layer_inputs, ovq_mixers, read_by_chunk, render, token_texts
from ovq.models import OVQConfig, OVQForCausalLM
from ovq.ops.ovq_attention import OVQState, diagnose
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.run_config import RunConfig, TrainingConfig
from ovq.runs import MODEL_FOLDER, write_run
from ovq.tasks import LanguageModelingTask, RecallTask

BYTES = LanguageModelingTask(context_length=16)
RECALL = RecallTask(context_length=32, num_queries=2, num_keys=32, num_values=4, num_filler=4)
TEXT = "In the beginning God created the heaven and the earth. In the end."
HOSTILE = "a</script><b>bold</b><!-- <script> CONTENT \\u003c &lt; é 😀\u2028'\""
FIELDS = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_pattern": ["sliding_window", "ovq"],
    "window_size": 5,
    "dictionary": {"num_centroids": 12, "chunk_size": 8},
    "initializer_range": 0.3,
}


def make_model(vocab_size=256, **changes):
    """A model with random weights, large enough that tokens differ."""
    torch.manual_seed(0)
    return OVQForCausalLM(OVQConfig(vocab_size=vocab_size, **(FIELDS | changes))).eval()


def content_of(text=TEXT, model=None, task=BYTES, **options):
    model = make_model() if model is None else model
    return inspect(model, task, text, name="tiny", source="some.txt", **options)


@pytest.fixture(scope="module")
def content():
    return content_of()


def test_beta_of_scalable_softmax_is_that_of_the_last_query(content):
    scaled = content_of(model=make_model(ssmax_length=32))
    tokens = len(scaled["layers"][0]["heads"][0]["slots"])
    for plain, other in zip(*(c["layers"][0]["heads"] for c in (content, scaled)), strict=True):
        for query, same in zip(plain["queries"], other["queries"], strict=True):
            assert query["is_scaled"] is False
            assert same["is_scaled"] is True
            grown = query["beta"] * math.log(tokens) / math.log(32)
            assert same["beta"] == pytest.approx(grown, abs=2e-3)


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def test_the_page_reaches_for_nothing(content):
    page = render(content)
    found = Page(page)
    names = {name for _, attributes in found.elements for name in attributes}
    assert not names & {"src", "href", "srcset", "action", "data", "poster", "formaction"}
    assert not {tag for tag, _ in found.elements} & {"link", "iframe", "img", "object", "base"}
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}  # a name
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttp|WebSocket|\bimport\b", page)


def test_the_policy_lets_the_one_script_run_and_nothing_else(content):
    found = Page(render(content))
    policy = next(
        attributes["content"]
        for tag, attributes in found.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    handlers = {name for _, attributes in found.elements for name in attributes if name[:2] == "on"}
    assert handlers == set()


def test_a_hostile_text_stays_data(content):
    hostile = content_of(HOSTILE)
    found = Page(render(hostile))
    assert len(found.scripts) == 2
    assert "b" not in {tag for tag, _ in found.elements}
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in Page(render(content)).elements]
    read = json.loads(found.scripts[0])
    assert read == hostile
    assert "".join(text or "" for text in read["tokens"]) == HOSTILE


def test_a_hostile_name_stays_data(content):
    hostile = content | {"run": HOSTILE, "source": HOSTILE}
    found = Page(render(hostile))
    assert len(found.scripts) == 2
    assert json.loads(found.scripts[0]) == hostile


@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        ({}, [4, 6, 8, 8, 9, 9, 9, 10]),  # 12 t / (t + 12)
        ({"growth": "linear", "growth_length": 64}, [1, 3, 4, 6, 7, 9, 10, 12]),
        ({"growth": "immediate"}, [8, *[12] * 7]),
    ],
)
def test_the_growth_is_the_schedules(growth, expected):
    content = content_of(model=make_model(dictionary=FIELDS["dictionary"] | growth))
    for layer in content["layers"]:
        assert layer["active"] == layer["schedule"] == expected
        for head in layer["heads"]:
            opened = [max(head["slots"][: 8 * (i + 1)]) + 1 for i in range(len(expected))]
            assert opened == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_short_conv": True, "layer_pattern": ["ovq"]},
        {"dictionary": {"num_centroids": 12, "chunk_size": 8, "centroid": "unit"}},
        {"dictionary": {"num_centroids": 12, "chunk_size": 8, "window_size": 16}},
    ],
)
def test_the_weights_give_the_layers_output(changes):
    model = make_model(**changes)
    ids = BYTES.encode(TEXT)[:61]
    mixers = ovq_mixers(model)
    outputs = {}
    for index, mixer in mixers.items():

        def keep(module, arguments, index=index):
            outputs[index] = arguments[0]

        mixer.o_proj.register_forward_pre_hook(keep)
    with torch.no_grad():
        inputs = layer_inputs(model, ids, mixers)
        for index, mixer in mixers.items():
            q, k, v, _ = mixer.queries_keys_values(inputs[index])
            found = []
            for i, read in enumerate(read_by_chunk(mixer, q, k, v)):
                of_chunk = v[0, i * 8 : i * 8 + 8]
                exact = torch.cat([read.before.tail_values[0], of_chunk])
                exact = exact.repeat_interleave(2, dim=1)  # [L + c, H, V]
                means = read.before.value_means[0].repeat_interleave(2, dim=0)  # [H, N, V]
                o = torch.einsum("chn,hnv->chv", read.on_slots, means)
                found.append(o + torch.einsum("chs,shv->chv", read.on_exact, exact))
            real = outputs[index][0].unflatten(-1, (4, -1))
            torch.testing.assert_close(torch.cat(found), real, atol=1e-5, rtol=1e-4)


def test_slots_and_reads_are_those_of_one_call(content):
    model = make_model()
    ids, mixers = BYTES.encode(TEXT), ovq_mixers(model)
    with torch.no_grad():
        inputs = layer_inputs(model, ids, mixers)
        for part, (index, mixer) in zip(content["layers"], mixers.items(), strict=True):
            assert part["layer"] == index
            q, k, v, _ = mixer.queries_keys_values(inputs[index])
            _, state, slots = ovq_attention_with_slots(
                q, k, v, mixer.beta, dictionary=mixer.dictionary, impl="reference"
            )
            found = diagnose(state)
            weights = torch.cat([read.on_slots for read in read_by_chunk(mixer, q, k, v)])
            for g, head in enumerate(part["heads"]):
                assert head["slots"] == slots.tokens[0, :, g].tolist()
                assert head["figures"]["num_active"] == int(found.num_active)
                assert head["figures"]["perplexity"] == pytest.approx(float(found.perplexity[0, g]))
                assert [query["query_head"] for query in head["queries"]] == [2 * g, 2 * g + 1]
                for query in head["queries"]:
                    check_reads(query, weights[:, query["query_head"]])


def check_reads(query, weights):
    """The slots of most weight, in order, to a thousandth."""
    T, k = len(weights), 8
    slots, kept = (torch.tensor(query[name]).view(T, k) for name in ("top_slots", "top_weights"))
    expected = weights.sort(dim=-1, descending=True).values[:, :k]
    assert (kept / 1000 - expected).abs().max() <= 5.1e-4
    assert (kept / 1000 - weights.gather(1, slots)).abs().max() <= 5.1e-4
    total = torch.tensor(query["on_dictionary"]) / 1000
    assert (total - weights.sum(-1)).abs().max() <= 5.1e-4
    assert total[:8].eq(0).all()
    assert total[8:].max() > 0.9


def test_looking_leaves_the_model_as_it_was():
    model = make_model()
    ids = BYTES.encode(TEXT)[None]
    before = model(ids, use_cache=False).logits
    content_of(model=model)
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_text_is_cut_to_what_a_page_holds(monkeypatch):
    content = content_of(max_tokens=20)
    assert (len(content["tokens"]), content["num_tokens_of_text"]) == (20, len(TEXT))
    # Eight heads, each of whose tokens has three slots and a cell for the rest.
    monkeypatch.setattr(inspection, "MAX_CELLS", 8 * 30 * (3 + 1))
    content = content_of(max_tokens=30)
    assert (len(content["tokens"]), content["slots_kept"]) == (30, 3)
    assert len(content["layers"][0]["heads"][0]["queries"][0]["top_slots"]) == 90
    monkeypatch.setattr(inspection, "MAX_CELLS", 8 * 10 * (1 + 1))
    content = content_of(max_tokens=30)
    assert (len(content["tokens"]), content["slots_kept"]) == (10, 1)


def test_the_largest_page_is_near_three_megabytes():
    """Slots of five digits, weights of three."""
    content, num_queries = content_of(max_tokens=9), 2 * 4
    tokens = inspection.MAX_CELLS // (num_queries * (inspection.SLOTS_KEPT + 1))
    content["tokens"] = ["a"] * tokens
    pairs = tokens * inspection.SLOTS_KEPT
    for head in (head for layer in content["layers"] for head in layer["heads"]):
        head["slots"] = [99999] * tokens
        for query in head["queries"]:
            query["top_slots"], query["top_weights"] = [99999] * pairs, [125] * pairs
            query["on_dictionary"] = [1000] * tokens
    assert 2_000_000 < len(render(content)) < 3_200_000


@pytest.mark.parametrize("length", [1, 7, 8])
def test_short_texts(length):
    content = content_of(TEXT[:length])
    assert len(content["tokens"]) == length
    (layer, _), full = content["layers"], length // 8
    assert layer["active"] == layer["schedule"] == [4][:full]
    figures = layer["heads"][0]["figures"]
    assert (figures["error_of_keys"] is None) == (full == 0)
    assert json.loads(Page(render(content)).scripts[0]) == content


def test_one_layer_and_progress():
    seen = []
    content = content_of(layer=3, progress=lambda *done: seen.append(done))
    assert [part["layer"] for part in content["layers"]] == [3]
    assert seen == [(i + 1, 9) for i in range(9)]
    content_of(progress=lambda *done: seen.append(done))
    assert seen[9:] == [(i + 1, 18) for i in range(18)]


def test_token_texts():
    def texts(text):
        return token_texts(BYTES, BYTES.encode(text).tolist())

    assert texts("aé😀\n") == ["a", None, "é", None, None, None, "😀", "\n"]
    assert texts("\ufffda")[-1] == "a"
    assert token_texts(BYTES, [0xF0, 0x9F, 97]) == ["\ufffd", "\ufffd", "a"]
    ids = RECALL.encode("f1 k3 v2 ? k3").tolist()
    assert token_texts(RECALL, ids) == ["f1", "k3", "v2", "?", "k3"]


def test_names_of_tokens_are_set_apart(content):
    recall = content_of("f1 k3 v2 ? k3", make_model(RECALL.vocab_size), RECALL)
    assert recall["spaced"]
    assert not content["spaced"]


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run folder as training leaves it."""

    def make(task=BYTES, **changes):
        model = make_model(task.vocab_size, **changes)
        config = RunConfig(
            name="tiny",
            task=task,
            model=FIELDS | changes,
            training=TrainingConfig(num_steps=1, batch_size=1, learning_rate=0.1),
        )
        folder = tmp_path / "run"
        write_run(folder, {"config": config.to_dict(), "status": "done"})
        model.save_pretrained(folder / MODEL_FOLDER)
        return folder

    return make


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_command_writes_the_page(make_run, tmp_path):
    text, page = tmp_path / "text.txt", tmp_path / "out" / "page.html"
    text.write_text(TEXT)
    result = invoke(make_run(), "--text", text, "-o", page, "--max-tokens", 40)
    assert result.exit_code == 0, result.output
    assert f"{page.stat().st_size:,} bytes" in result.stdout
    assert f"40 of {len(TEXT)} tokens in layers 1, 3" in result.stdout
    content = json.loads(Page(page.read_text(encoding="utf-8")).scripts[0])
    about = {"source": "text.txt", "run": "run"}  # of the file and the folder
    assert content == content_of(max_tokens=40) | about
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("run", "data", "options", "line"),
    [
        ({}, b"", (), "text must hold at least one token, got none in text.txt"),
        ({}, b"caf\xe9", (), "text must be UTF-8"),
        ({}, b"x", ("--layer", "2"), "an OVQ layer of the model, 1, 3, got 2"),
        ({}, b"x", ("--layer", "4"), "an OVQ layer of the model, 1, 3, got 4"),
        (
            {"layer_pattern": ["sliding_window", "full_attention"]}, b"x", (),
            "a model with OVQ layers, got one with the mixers full_attention, sliding_window",
        ),
        ({"task": RECALL}, b"k1 hello", (), "only the token names"),
        ({"task": RECALL}, b" \n", (), "at least one token"),
    ],
)  # fmt: skip
def test_errors_are_one_line(make_run, tmp_path, run, data, options, line):
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_bytes(data)
    result = invoke(make_run(**run), "--text", text, "-o", page, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert line in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not page.exists()


def test_a_missing_text_or_run(make_run, tmp_path):
    result = invoke(make_run(), "--text", tmp_path / "nowhere.txt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere.txt" in result.stderr
    (tmp_path / "text.txt").write_text("x")
    result = invoke(tmp_path, "--text", tmp_path / "text.txt")
    assert "RUN must be a run folder" in result.stderr


def test_the_state_of_a_read_is_an_ovq_state():
    model = make_model()
    (mixer, *_) = ovq_mixers(model).values()
    with torch.no_grad():
        q, k, v, _ = mixer.queries_keys_values(torch.randn(1, 20, 32))
        reads = list(read_by_chunk(mixer, q, k, v))
    assert [len(read.on_slots) for read in reads] == [8, 8, 4]
    assert all(isinstance(read.before, OVQState) for read in reads)
    assert [read.before.num_tokens.tolist() for read in reads] == [[0], [8], [16]]
