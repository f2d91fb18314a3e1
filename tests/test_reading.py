"""A text read once: in pieces, interrupted or not, on top of another, always to the same state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ovq.evaluate
import ovq.reading
from ovq.evaluate import generate
from ovq.models import OVQCache, OVQConfig, OVQForCausalLM
from ovq.models.state_file import Fingerprint
from ovq.reading import (
    Reading,
    ReadingInterruptedError,
    Source,
    begin_reading,
    check_output,
    read,
    read_to_file,
    unfinished_file,
)
from ovq.reading_report import kv_cache_bytes, markdown, record_of, summary

PIECE = 5
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model() -> OVQForCausalLM:
    return make_model()


def make_model(seed: int = 0) -> OVQForCausalLM:
    torch.manual_seed(seed)
    config = OVQConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        window_size=4,
        dictionary={"num_centroids": 6, "chunk_size": 4},
        initializer_range=0.3,
    )
    return OVQForCausalLM(config).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(61, (23,), generator=torch.Generator().manual_seed(0))


def begin(model, ids, text="a text", state=None, name="book.txt") -> Reading:
    return begin_reading(model, state, name=name, text=text, num_tokens=len(ids))


def read_all(model, ids, output, **options) -> tuple[Reading, int]:
    start = begin(model, ids)
    return read_to_file(model, ids, output, begin=start, piece=PIECE, **options)


def digest_of(path) -> str:
    """Of everything in a state file."""
    with safe_open(path, framework="pt") as file:
        return file.metadata()["digest"]


def interrupt_at(count, error=KeyboardInterrupt):
    def progress(done, total):
        if done >= count * PIECE:
            raise error

    return progress


def test_pieces_follow_one_another_and_equal_one_call(model, ids):
    readings = list(read(model, ids, begin(model, ids), PIECE))
    assert [r.sources[-1].num_read for r in readings] == [5, 10, 15, 20, 23]
    assert [r.num_tokens for r in readings] == [5, 10, 15, 20, 23]
    with torch.no_grad():
        logits = model(ids[None]).logits
    for reading in readings:
        expected = logits[:, reading.num_tokens - 1]
        torch.testing.assert_close(reading.next_logits, expected, atol=1e-5, rtol=1e-5)


def test_a_text_on_top_of_another_is_one_text(model, ids, tmp_path):
    first, second = ids[:10], ids[10:]
    *_, whole = read(model, ids, begin(model, ids), PIECE)
    read_all(model, first, tmp_path / "first.state")
    start = begin(model, second, "more", tmp_path / "first.state", "more.txt")
    both, num_new = read_to_file(
        model, second, tmp_path / "both.state", begin=start, piece=PIECE
    )  # fmt: skip
    assert num_new == 13
    assert both.num_tokens == 23
    assert both.next_logits.equal(whole.next_logits)
    assert [source.name for source in both.sources] == ["book.txt", "more.txt"]
    assert [str(source) for source in both.sources] == [
        "10 tokens of book.txt", "13 tokens of more.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_interrupted_reading_goes_on_to_the_same_state(model, ids, tmp_path, count):
    expected, output = tmp_path / "expected.state", tmp_path / "book.state"
    read_all(model, ids, expected)
    done = min(count * PIECE, 23)
    with pytest.raises(ReadingInterruptedError, match=f"interrupted at token {done} of 23"):
        read_all(model, ids, output, progress=interrupt_at(done / PIECE))
    assert not output.exists()
    assert unfinished_file(output).exists()
    reading, num_new = read_all(model, ids, output)
    assert num_new == 23 - done
    assert reading.sources[-1].num_read == 23
    assert digest_of(output) == digest_of(expected)
    assert {path.name for path in tmp_path.iterdir()} == {"expected.state", "book.state"}


def test_an_interrupt_before_the_first_piece_leaves_nothing(model, ids, tmp_path, monkeypatch):
    monkeypatch.setattr(ovq.reading, "read", lambda *arguments: iter_interrupt())
    with pytest.raises(ReadingInterruptedError, match="token 0 of 23"):
        read_all(model, ids, tmp_path / "book.state")
    assert list(tmp_path.iterdir()) == []


def iter_interrupt():
    raise KeyboardInterrupt
    yield


def test_a_killed_reading_loses_what_came_after_the_last_save(model, ids, tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    monkeypatch.setattr(ovq.reading, "SAVE_EVERY", -1.0)
    monkeypatch.setattr(ovq.reading, "SAVE_SHARE", float("inf"))
    with pytest.raises(KilledError):
        read_all(model, ids, tmp_path / "book.state", progress=interrupt_at(3, KilledError))
    _, num_new = read_all(model, ids, tmp_path / "book.state")
    assert num_new == 13


def test_an_interrupt_while_the_state_is_written(model, ids, tmp_path, monkeypatch):
    save, output = Reading.save, tmp_path / "book.state"

    def interrupted(self, path, **options):
        if path == output:
            raise KeyboardInterrupt
        save(self, path, **options)

    monkeypatch.setattr(Reading, "save", interrupted)
    with pytest.raises(ReadingInterruptedError, match="token 23 of 23"):
        read_all(model, ids, output)
    monkeypatch.undo()
    assert read_all(model, ids, output)[1] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["book.state"]


def test_what_was_written_before_is_left(model, ids, tmp_path):
    output = tmp_path / "book.state"
    read_all(model, ids, output)
    before = output.stat().st_mtime_ns
    unfinished_file(output).write_text("of a call that was killed at its end")
    reading, num_new = read_all(model, ids, output)
    assert (reading.num_tokens, num_new) == (23, 0)
    assert output.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["book.state"]
    assert read_all(model, ids[:20], output)[1] == 20
    assert read_all(make_model(1), ids[:20], output)[1] == 20


def test_another_reading_is_not_gone_on_with(model, ids, tmp_path):
    output = tmp_path / "book.state"
    with pytest.raises(ReadingInterruptedError):
        read_all(model, ids, output, progress=interrupt_at(2))
    other = begin(model, ids, "another text")
    advice = rf"delete {unfinished_file(output)}, and the same command reads from the start"
    with pytest.raises(ValueError, match=f"--output must have no other reading.*{advice}"):
        read_to_file(model, ids, output, begin=other, piece=PIECE)
    with pytest.raises(ValueError, match=f"weights .*{advice}"):
        read_all(make_model(1), ids, output)
    with pytest.raises(ValueError, match=advice):
        read_all(model, ids[:20], output)
    unfinished_file(output).write_bytes(unfinished_file(output).read_bytes()[:-1])
    with pytest.raises(ValueError, match=advice):
        read_all(model, ids, output)


def test_outputs_that_would_cost_something_are_refused(model, ids, tmp_path):
    book, state = tmp_path / "book.txt", tmp_path / "book.state"
    book.write_text("In the beginning")
    with pytest.raises(ValueError, match="--output must be a new file or a state file"):
        check_output(book, None)
    read_all(model, ids, state)
    check_output(state, None)
    with pytest.raises(ValueError, match="--output must be another file than --state"):
        check_output(tmp_path / "." / "book.state", state)
    with pytest.raises(ValueError, match="text must hold at least one token"):
        read_all(model, ids[:0], tmp_path / "other.state")


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (2.0, None), (2.0, 7)])
@pytest.mark.parametrize("num_new", [1, 9])
def test_going_on_without_a_prompt_is_going_on_from_the_text(
    model, ids, tmp_path, monkeypatch, temperature, top_k, num_new
):
    """What ``generate`` makes of the whole as a prompt in the same pieces, the library sampling."""
    monkeypatch.setattr(ovq.evaluate, "PIECE", PIECE)
    options = {"max_new_tokens": num_new, "temperature": temperature, "top_k": top_k, "seed": 3}
    expected = generate(model, ids, **options)
    read_all(model, ids, tmp_path / "book.state")
    reading = Reading.load(tmp_path / "book.state", model=model)
    found = generate(
        model, ids[:0], cache=reading.cache, next_logits=reading.next_logits, **options
    )
    assert found == expected


def test_a_prompt_after_a_state_is_one_text_with_it(model, ids, tmp_path):
    options = {"max_new_tokens": 12, "temperature": 0.0}
    expected = generate(model, ids, **options)
    read_all(model, ids[:15], tmp_path / "book.state")
    reading = Reading.load(tmp_path / "book.state", model=model)
    assert generate(model, ids[15:], cache=reading.cache, **options) == expected
    assert reading.num_tokens == 15


def test_a_memory_saved_from_python_goes_on_with_a_prompt(model, ids, tmp_path):
    *_, reading = read(model, ids, begin(model, ids))
    reading.cache.save(tmp_path / "memory.state", model=model)
    loaded = Reading.load(tmp_path / "memory.state", model=model)
    assert loaded.next_logits is None
    assert [(s.name, s.num_read) for s in loaded.sources] == [("memory.state", 23)]
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        generate(model, ids[:0], max_new_tokens=3, temperature=0.0, cache=loaded.cache)
    reading.save(tmp_path / "book.state", fingerprint=Fingerprint.of(model))
    memory = OVQCache.load(tmp_path / "book.state", model=model)
    assert memory.num_columns == 23


def test_the_kv_cache_is_that_of_full_attention(model):
    """Keys and values of 2 heads of 8 float32 numbers, and a count, in each of 3 layers."""
    assert kv_cache_bytes(model, 1000)["every_layer"] == 3 * (1000 * 2 * 2 * 8 * 4 + 8)
    window = 3 * 2 * 2 * 8 * 4 + 8
    assert kv_cache_bytes(model, 1000)["beside_windows"] == 2 * window + 1000 * 128 + 8
    half = make_model().to(torch.bfloat16)
    assert kv_cache_bytes(half, 1000)["every_layer"] == 3 * (1000 * 2 * 2 * 8 * 2 + 8)
    full = model.config.to_dict() | {"layer_pattern": ["full_attention"]}
    with torch.no_grad():
        tokens = torch.ones(1, 40, dtype=torch.int64)
        cache = OVQForCausalLM(OVQConfig(**full))(tokens, use_cache=True, return_dict=False)[1]
    assert kv_cache_bytes(model, 40)["every_layer"] == cache.num_bytes


def test_a_record_tells_sizes_and_seconds(model, ids, tmp_path):
    reading, num_new = read_all(model, ids, tmp_path / "book.state")
    found = record_of(
        model, reading, tmp_path / "book.state", run="tiny", num_new=num_new, seconds=2.0
    )
    assert json.loads(json.dumps(found)) == found
    assert found["file_bytes"] == (tmp_path / "book.state").stat().st_size
    assert found["state_bytes"] == reading.cache.num_bytes
    assert "23 tokens read in 2.0 s, 12 tokens/s" in summary(found)
    assert "written before" in summary(found | {"num_new": 0})
    assert f"{found['kv_cache_bytes']['every_layer']:,} bytes" in summary(found)


def test_the_state_keeps_its_size(model, ids):
    sizes = {r.cache.num_bytes for r in read(model, ids.repeat(5), begin(model, ids), PIECE)}
    assert len(sizes) == 1


def test_an_unfinished_source_says_how_far_it_came():
    source = Source(name="book.txt", sha256="", num_tokens=2000, num_read=1000)
    assert str(source) == "1,000 of 2,000 tokens of book.txt"
    assert str(replace(source, num_read=2000)) == "2,000 tokens of book.txt"


def test_the_table_of_the_results_is_the_records():
    folder = ROOT / "results/state_file"
    record = json.loads((folder / "state_file.json").read_text(encoding="utf-8"))
    assert markdown(record) in (folder / "README.md").read_text(encoding="utf-8")
