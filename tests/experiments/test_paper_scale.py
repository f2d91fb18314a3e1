"""The paper's scale at a toy's size: what is written for GPUs at least runs, alone and in two."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ovq.experiments import EXPERIMENTS, Entry, make_experiments, run_experiment
from ovq.runs import read_run

TASKS = {
    "recall": {"num_queries": 2, "num_keys": 64},
    "positional_recall": {"num_queries": 2, "num_keys": 64, "curriculum_fraction": 0.5},
    "forgetting": {"first_length": 32, "num_queries": 2, "num_keys": 64, "num_later_keys": 64},
    "mqar": {"vocab_size": 128, "initial_pairs": 2},
    "regression": {"num_features": 2, "num_functions": 4, "code_length": 4},
}
MODEL = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2,
    "head_dim": 16, "window_size": 8, "block_size": 4, "num_codes": 8, "ssm_state_size": 16,
}  # fmt: skip


def toy_task(task):
    """The same task in 64 places."""
    from ovq.tasks import task_from_dict, task_to_dict

    fields = task_to_dict(task)
    changes = TASKS[fields["name"]] | {"context_length": 64}
    if "curriculum_fraction" in fields:
        changes.setdefault("curriculum_fraction", 1.0)
    return task_from_dict(fields | changes)


def toy(entry: Entry) -> Entry:
    """The same entry in a model of a few thousand parameters, for one step."""
    config = entry.config
    dictionary = config.model["dictionary"] | {"num_centroids": 8, "chunk_size": 4}
    dictionary |= {"window_size": 4 * bool(dictionary.get("window_size"))}
    if dictionary.get("growth_length"):
        dictionary["growth_length"] = 64
    training = replace(
        config.training, num_steps=1, batch_size=4, accumulation_steps=2, warmup_steps=0,
        short_length=config.training.short_length and 16,
    )  # fmt: skip
    task = toy_task(config.task)
    model = config.model | MODEL | {"dictionary": dictionary}
    model |= {"num_identity_layers": min(1, model.get("num_identity_layers", 0))}
    point = replace(entry.points[0], length=64, setting=None, num_sequences=2, changes={})
    return replace(
        entry, config=replace(config, task=task, model=model, training=training), points=(point,)
    )


def toy_suite(name, **changes):
    (experiment,) = make_experiments(name, "paper")
    chosen = [entry for entry in experiment.entries if not entry.name.endswith("480m")]
    if name != "recall" or os.environ.get("OVQ_LONG") != "1":  # recall has every mixer
        chosen = [entry for entry in chosen if entry.config.name.split("-")[0] == name]
        chosen = [entry for entry in chosen if "ovq" in entry.config.model["layer_pattern"]][:2]
        chosen = chosen or list(experiment.entries[-1:])
    entries = tuple(map(toy, chosen))
    return replace(experiment, entries=entries, learning_rates=(1e-3,), seeds=(0,), **changes)


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*autocast.*")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_suite_of_the_papers_scale_runs_at_toy_size(name, tmp_path):
    experiment = toy_suite(name)
    assert all(entry.config.training.bf16 for entry in experiment.entries)
    assert all(entry.config.training.gradient_checkpointing for entry in experiment.entries)
    record = run_experiment(experiment, tmp_path)
    assert record["counts"] == {"done": len(experiment.entries)}, record


SHARED = """
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from ovq.experiments import run_experiment
from tests.experiments.toys import toy_experiment

experiment = toy_experiment(seeds=(0,))
record = run_experiment(experiment, Path(sys.argv[2]))
print("counts", record.get("counts"), flush=True)
"""


@pytest.mark.skipif(os.environ.get("OVQ_LONG") != "1", reason="takes half a minute: set OVQ_LONG=1")
def test_two_processes_of_torchrun_make_the_run_of_one(tmp_path):
    """They share each step's sequences; the first one measures and writes."""
    from .toys import toy_experiment

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script), str(Path(__file__).parents[2]),
         str(tmp_path / "two")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("counts {'done': 4}") == 1
    assert run.stdout.count("counts None") == 1
    run_experiment(toy_experiment(seeds=(0,)), tmp_path / "one")
    for path in sorted((tmp_path / "one").rglob("run.json")):
        one = read_run(path.parent)
        two = read_run(tmp_path / "two" / path.parent.relative_to(tmp_path / "one"))
        assert two["training"]["losses"] == pytest.approx(one["training"]["losses"], rel=1e-4)
        assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-4)
        json.dumps(two)
