"""Runs small enough to train in a second."""

from dataclasses import replace

from ovq.run_config import EvaluationConfig, RunConfig, TrainingConfig
from ovq.tasks import LanguageModelingTask, RecallTask

STEPS = 8


def tiny_run(**training) -> RunConfig:
    """Recall, with some of its training changed."""
    return RunConfig(
        name="tiny",
        task=RecallTask(
            context_length=32,
            num_queries=2,
            num_keys=32,
            num_values=4,
            num_filler=4,
            initial_tokens_per_pair=4,
        ),
        model={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "layer_pattern": ["sliding_window", "ovq"],
            "window_size": 4,
            "dictionary": {"num_centroids": 8, "chunk_size": 4},
        },
        training=TrainingConfig(
            **(
                {"num_steps": STEPS, "batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 2}
                | {"curriculum": True, "save_every": 3}
                | training
            )
        ),
        evaluation=EvaluationConfig(num_sequences=4),
    )


def tiny_text_run(source, **training) -> RunConfig:
    """Language modelling on a folder."""
    task = LanguageModelingTask(source=str(source), context_length=16)
    return replace(tiny_run(curriculum=False, **training), task=task)
