"""A long prompt read in pieces needs the memory of one piece."""

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from ovq.models import OVQConfig, OVQForCausalLM
from ovq.models.cache import CACHE_FIELD
from tests.models.generating import generate

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LENGTH, PIECE, MEBIBYTE = 200_000 if os.environ.get("OVQ_LONG") == "1" else 30_000, 1024, 2**20


def resident(field: str) -> int:
    """Bytes in memory: ``VmRSS`` now, ``VmHWM`` at most since the last reset."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text())[1])


def peak_growth(call) -> int:
    """How many bytes more than now the call needs."""
    gc.collect()
    RESET.write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


@pytest.mark.plain
@pytest.mark.skipif(not RESET.exists(), reason="memory is measured through Linux's /proc")
def test_a_long_prompt_is_read_in_bounded_memory():
    torch.manual_seed(0)
    config = OVQConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, window_size=128,
        dictionary={"num_centroids": 256, "chunk_size": 64},
    )  # fmt: skip
    model = OVQForCausalLM(config).eval()
    ids = torch.randint(1, 4096, (1, LENGTH))
    found = []

    def read(num_tokens: int, piece: int | None) -> None:
        options = {"prefill_chunk_size": piece, "return_dict_in_generate": True}
        found.append(generate(model, ids[:, :num_tokens], 3, **options))

    read(3 * PIECE, PIECE)  # what is loaded at the first use
    in_pieces = peak_growth(lambda: read(LENGTH, PIECE))
    at_once = peak_growth(lambda: read(LENGTH, None))
    kv_cache = 2 * 2 * 64 * 4 * LENGTH  # keys and values of two layers of full attention
    assert in_pieces < 10 * MEBIBYTE < kv_cache / 2
    assert at_once > 5 * in_pieces  # so the figure above could have been larger
    assert found[1].sequences.equal(found[2].sequences)
    first, second, _ = (output[CACHE_FIELD] for output in found)
    assert first.num_bytes == second.num_bytes == model.state_size(LENGTH)
