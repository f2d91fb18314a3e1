"""The page of `ovq inspect` as a browser draws it: what it says is what the state holds."""

import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from ovq.inspection import layer_inputs, ovq_mixers, read_by_chunk, render
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from tests.test_inspection import BYTES, FIELDS, content_of, make_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
WINDOW = FIELDS["dictionary"] | {"window_size": 16, "num_centroids": 20}
TEXT = "the cat sat on the mat, the dog lay on the log; a hen ran to the pen and a pig dug. " * 2
LAYER, HEAD, QUERY_HEAD = 1, 1, 3


class Drawn(HTMLParser):
    """The text of each element that has an id, and the cells of every table row below it."""

    VOID = ("meta", "br")

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.rows = [], {}, {}
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in self.VOID:
            return
        self.open.append(dict(attrs).get("id"))
        for name in filter(None, self.open):
            if tag == "tr":
                self.rows.setdefault(name, []).append([])
            elif tag in ("td", "th"):
                self.rows[name][-1].append("")

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            self.open.pop()

    def handle_data(self, data):
        for name in filter(None, self.open):
            self.text[name] = self.text.get(name, "") + data
            if self.rows.get(name) and self.rows[name][-1]:
                self.rows[name][-1][-1] += data


def drawn(content, tmp_path, token=None):
    """The page as it stands once its script has run, which must not complain."""
    page = tmp_path / "page.html"
    page.write_text(render(content), encoding="utf-8")
    chosen = f"#layer={LAYER}&head={HEAD}" + ("" if token is None else f"&token={token}")
    run = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
            f"{page.as_uri()}{chosen}",
        ],
        capture_output=True, encoding="utf-8", timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in run.stderr
    return Drawn(run.stdout)


@pytest.mark.parametrize(
    ("dictionary", "token"), [(WINDOW, 101), (FIELDS["dictionary"], 101), (WINDOW, 20)]
)
def test_what_a_token_reads_is_what_the_state_held(dictionary, token, tmp_path):
    model, ids = make_model(dictionary=dictionary), BYTES.encode(TEXT)
    mixer = ovq_mixers(model)[LAYER]
    with torch.no_grad():
        q, k, v, _ = mixer.queries_keys_values(layer_inputs(model, ids, {LAYER: mixer})[LAYER])
        reads = list(read_by_chunk(mixer, q, k, v))
        _, _, slots = ovq_attention_with_slots(
            q, k, v, mixer.beta, dictionary=mixer.dictionary, impl="reference"
        )
    joined, read = slots.tokens[0, :, HEAD].tolist(), reads[token // 8]
    page = drawn(content_of(TEXT, model), tmp_path, token)
    weights = read.on_slots[token % 8, QUERY_HEAD]
    counts, absorbed = read.before.counts[0, HEAD], int(read.before.num_absorbed)
    panel, rows = page.text["panel"], page.rows.get("panel", [])
    shown = rows[max((i for i, row in enumerate(rows) if row[0] == "slot"), default=0) + 1 :]
    assert bool(shown) == bool(absorbed)
    for slot, weight, count, members in shown:
        assert abs(float(weight.split()[0]) / 100 - float(weights[int(slot)])) < 6e-4
        assert int(count) == int(counts[int(slot)])
        latest = [i for i in range(absorbed) if joined[i] == int(slot)][-2:]
        nearby = [TEXT[max(0, i - 8) : i + 5].replace(" ", "␣") for i in reversed(latest)]
        assert members.replace(" ", "␣") == "".join(nearby)
    assert f"dictionary {100 * float(weights.sum()):.1f}" in panel
    assert ("The dictionary is still empty." in panel) == (not absorbed)
    size, start = dictionary.get("window_size", 0), token // 8 * 8
    exactly = f"also read tokens {max(0, start - size)} to {start - 1} exactly"
    assert (exactly in panel) == (size > 0)
    assert ("window and its own chunk" in panel) == (size > 0)
    window = dict(row for row in page.rows["diagnostics"])["window of exact tokens"]
    assert window == (str(size) if size else "none")
    assert (f"windows of {size} tokens" in page.text["about"]) == (size > 0)


def test_the_first_token_of_a_slot_need_not_have_opened_it(tmp_path):
    """A key may open a slot that an earlier one of its chunk then joins."""
    content = content_of(TEXT)
    slots = content["layers"][0]["heads"][HEAD]["slots"]
    token = max(i for i, slot in enumerate(slots) if slots.index(max(slot, 0)) < i)
    page = drawn(content, tmp_path, token)
    first, number = slots.index(slots[token]), slots.count(slots[token])
    assert f"Slot {slots[token]} of {number} tokens, token {first} the first." in page.text["panel"]
    assert "opened it" not in page.text["panel"]
    assert "opened by" not in page.text["panel"]


def test_a_hostile_text_is_text(tmp_path):
    """Nothing of it runs, and nothing of it hides or turns what stands beside it."""
    hostile = "<script>document.title='x'</script><img src=x onerror=document.title=1>"
    hostile += "\u202eabc\u2066\u200d\ufeff\x00\x1b\r\n\tend\u2028\U000e0041" + "a" * 300
    page = drawn(content_of(hostile), tmp_path, len(hostile) // 2)
    shown = page.text["text"].replace("·", "")
    for character in "\u202e\u2066\u200d\ufeff\x00\x1b\r\u2028\U000e0041":
        assert character not in page.text["text"]
        assert character not in page.text["panel"]
    assert shown.startswith(hostile[:70])
    after = r"\u202eabc\u2066\u200d\ufeff\x00\x1b\r" + "↵\n\tend" + r"\u2028\u{e0041}" + "a" * 300
    assert shown.endswith(after)
    assert page.text["title"] == "ovq inspect: tiny"
