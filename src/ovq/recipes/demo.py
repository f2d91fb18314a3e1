"""The demo: three models of equal size on in-context recall, and a small model of a book.

The recall models differ in one layer. Their sliding windows and OVQ's chunk are an eighth of the
training context, so that answering takes more than looking nearby.
"""

from typing import Any

from ovq.run_config import EvaluationConfig, RunConfig, TrainingConfig
from ovq.tasks import LanguageModelingTask, RecallTask

CONTEXT = 128


# Slots grow in step with the context, and near-duplicates do not both open one. The paper's rule,
# which has few slots left for the second half of a context of four tokens a slot, falls behind:
# see docs/findings.md.
DICTIONARY = {
    "num_centroids": CONTEXT // 2,
    "chunk_size": CONTEXT // 8,
    "growth": "linear",
    "growth_length": CONTEXT,
    "seeding": "novel",
}
PAPERS_DICTIONARY = {"num_centroids": CONTEXT // 2, "chunk_size": CONTEXT // 8}


def _recall(name: str, mixer: str, dictionary: dict[str, Any]) -> RunConfig:
    return RunConfig(
        name=name,
        task=RecallTask(
            context_length=CONTEXT,
            tokens_per_pair=8,
            num_queries=16,
            num_keys=256,
            num_values=16,
            num_filler=16,
            initial_tokens_per_pair=2,
            curriculum_fraction=0.7,
        ),
        model={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "layer_pattern": ["sliding_window", mixer],
            "window_size": CONTEXT // 8,
            "dictionary": dictionary,
            "initializer_range": 0.1,
        },
        training=TrainingConfig(
            num_steps=1600, batch_size=32, learning_rate=3e-3, warmup_steps=100, curriculum=True
        ),
        evaluation=EvaluationConfig(
            lengths=tuple(CONTEXT * 2**power for power in range(5)),
            num_centroids=("T/8", "T/4", "T/2"),
            num_sequences=64,
        ),
    )


def recall_sliding_window() -> RunConfig:
    """In-context recall with sliding windows only: the floor."""
    return _recall("demo-recall-sliding-window", "sliding_window", DICTIONARY)


def recall_full_attention() -> RunConfig:
    """In-context recall with sliding window and full attention: the ceiling."""
    return _recall("demo-recall-full-attention", "full_attention_nope", DICTIONARY)


def recall_ovq() -> RunConfig:
    """In-context recall with sliding window and OVQ attention."""
    return _recall("demo-recall-ovq", "ovq", DICTIONARY)


def recall_ovq_paper() -> RunConfig:
    """The same with the paper's growth and seeding."""
    return _recall("demo-recall-ovq-paper", "ovq", PAPERS_DICTIONARY)


def book() -> RunConfig:
    """A small byte-level model of a real book, sliding window and OVQ attention, in a minute."""
    return RunConfig(
        name="demo-book",
        task=LanguageModelingTask(source="kjv", context_length=512, tokenizer="bytes"),
        model={
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "layer_pattern": ["sliding_window", "ovq"],
            "window_size": 64,
            "dictionary": {"num_centroids": 256, "chunk_size": 64},
            "tie_word_embeddings": True,
        },
        training=TrainingConfig(
            num_steps=200, batch_size=8, learning_rate=3e-3, warmup_steps=30, save_every=100
        ),
        evaluation=EvaluationConfig(lengths=(512, 2048), num_sequences=16),
    )
