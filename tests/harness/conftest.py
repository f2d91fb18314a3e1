"""Toy items of every local task, a run trained on a text, and a model that is not ours."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ovq.train import train

from ..tiny import tiny_text_run
from .toys import ITEMS, byte_marks_tokenizer


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with items of every local task."""
    folder = tmp_path_factory.mktemp("items")
    for name, items in ITEMS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run folder of a model of bytes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "books").mkdir()
    (folder / "books/book.txt").write_text("In the beginning was the word. " * 40)
    train(tiny_text_run(folder / "books", num_steps=1), folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A folder of a model that is not ours."""
    folder = tmp_path_factory.mktemp("llama") / "source"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=512,
        )
    ).save_pretrained(folder)  # fmt: skip
    byte_marks_tokenizer().save_pretrained(folder)
    return folder
