"""A Llama-type model with random weights and a tokenizer of bytes, in a folder."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ovq.tasks.tokenization import END_OF_TEXT, byte_tokenizer, with_end_of_text


def make_source(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    fields = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()


def save_source(folder: Path) -> None:
    make_source().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=with_end_of_text(byte_tokenizer()), bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
    ).save_pretrained(folder)  # fmt: skip


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_source(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "book.txt").write_text("it was the best of times, it was the worst of times; " * 12)
    return folder
