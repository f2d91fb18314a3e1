"""Loss, accuracy and error of a model on a task, over all questions and over each kind of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from ovq.models import OVQForCausalLM, OVQForRegression
from ovq.tasks import IGNORED, InContextRegressionTask, Split, Task, TaskDataset

# Evaluation data has a seed of its own; the split keeps it apart from the training data anyway.
EVALUATION_SEED = 1
# Validation data are the items from here on of the same dataset, no two of which are drawn alike.
VALIDATION_START = 2**31
TOKENS_PER_BATCH = 32_768
ORACLES = ("least_squares", "pooled_least_squares", "nearest_neighbour")

Model = OVQForCausalLM | OVQForRegression
Scores = dict[str, Float[Tensor, "B T"]]


@torch.no_grad()
def measure(model: Model, task: Task, num_sequences: int, *, first: int = 0) -> dict[str, Any]:
    """Means over what the evaluation split asks, and the bytes of the state.

    Args:
        model: in evaluation mode.
        task: without a curriculum.
        num_sequences: of the split.
        first: number of the first of them.

    Returns:
        ``num_sequences``; ``loss``, in nats a labelled token or squared error a target;
        ``accuracy``, ``None`` where numbers are asked for; ``state_bytes`` of one row at the end;
        if the task tells kinds of questions apart, ``groups`` by name, each with its own means and
        the number ``asked``; in regression, ``oracles`` with the error of each solver by name.
    """
    dataset = TaskDataset(
        task, num_sequences=first + num_sequences, seed=EVALUATION_SEED, split=Split.EVALUATE
    )
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for indices in _batches(first, num_sequences, task.sequence_length):
        batch = dataset.batch(indices)
        scores = _token_scores(model, batch) if "labels" in batch else _errors(model, batch)
        for row in range(len(indices)):
            example = {name: tensor[row] for name, tensor in batch.items()}
            of_row = {name: score[row] for name, score in scores.items()}
            of_row |= _oracle_errors(task, example)
            asked = task.asked(example)
            asked[0] &= "labels" not in batch  # no token comes before the first
            for group, places in {"": asked, **task.groups(example)}.items():
                places = places & asked
                sums[group]["asked"] += int(places.sum())
                for name, score in of_row.items():
                    sums[group][name] += score[places].sum(dtype=torch.float64).item()
    means = {group: _means(of_group) for group, of_group in sums.items()}
    whole = means.pop("")
    del whole["asked"]
    groups = {"groups": {name: means[name] for name in sorted(means)}} if means else {}
    state_bytes = {"state_bytes": model.state_size(task.sequence_length)}
    return {"num_sequences": num_sequences, **whole, **state_bytes, **groups}


def _means(sums: Mapping[str, float]) -> dict[str, Any]:
    asked = int(sums["asked"])
    means = {name: total / max(1, asked) for name, total in sums.items() if name != "asked"}
    found: dict[str, Any] = {"asked": asked, "loss": means["loss"]}
    found["accuracy"] = means.get("accuracy")
    oracles = {name: means[name] for name in ORACLES if name in means}
    return found | ({"oracles": oracles} if oracles else {})


def _token_scores(model: Model, batch: Mapping[str, Tensor]) -> Scores:
    """Loss and accuracy at labelled tokens, zeros elsewhere."""
    labels = batch["labels"]
    places = (labels[:, 1:] != IGNORED).any(0).nonzero()[:, 0]
    logits = model(
        batch["input_ids"].to(model.device), logits_to_keep=places.to(model.device),
        use_cache=False,
    ).logits.cpu()  # fmt: skip
    expected = labels[:, places + 1]
    loss = torch.zeros(labels.shape)
    loss[:, places + 1] = cross_entropy(
        logits.float().movedim(-1, 1), expected, reduction="none", ignore_index=IGNORED
    )
    right = torch.zeros(labels.shape)
    right[:, places + 1] = (logits.argmax(-1) == expected).float()
    return {"loss": loss, "accuracy": right}


def _errors(model: Model, batch: Mapping[str, Tensor]) -> Scores:
    """Squared errors where numbers are asked for, something elsewhere."""
    found = model(batch["inputs"].to(model.device), use_cache=False).logits.float().cpu()
    return {"loss": (found - batch["targets"].nan_to_num()).square().mean(-1)}


def _oracle_errors(task: Task, example: Mapping[str, Tensor]) -> dict[str, Float[Tensor, " T"]]:
    """Squared errors of the solvers that a task of regression has, by name, zeros elsewhere."""
    if not isinstance(task, InContextRegressionTask):
        return {}
    found = {}
    for name in ORACLES:
        errors = torch.zeros(task.context_length, dtype=torch.float64)
        errors[task.asked(example)] = task.errors(example, getattr(task, name)(example)).double()
        found[name] = errors
    return found


def _batches(first: int, num_sequences: int, length: int) -> Iterator[range]:
    size = max(1, TOKENS_PER_BATCH // length)
    end = first + num_sequences
    for start in range(first, end, size):
        yield range(start, min(start + size, end))
