"""Measure a model on tasks; each result is kept as soon as it is there."""

import hashlib
import io
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import evaluate
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.task import Task

from ovq.harness.language_model import RequestProgress, UntruncatedLM, load_model, model_folder
from ovq.harness.results import check_place, keep, read_results
from ovq.run_config import environment
from ovq.runs import digest, digests

# Called with a task's name, its sequences scored and those in all.
Progress = Callable[[str, int, int], None]
# Called before the first task with those measured before and those in all, if there are any.
Known = Callable[[int, int], None]


def measure_task(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    limit: int | None = None,
    batch_size: int = 8,
    progress: RequestProgress | None = None,
) -> dict[str, Any]:
    """Score a model on one task with lm-eval.

    Args:
        model: of transformers, in evaluation mode.
        tokenizer: its own.
        task: of :func:`~ovq.harness.items.load_tasks`.
        limit: its first items only; ``None`` for all.
        batch_size: prompts in one forward call; changes no score.
        progress: called after every forward call. With it, lm-eval's own bars are off.

    Returns:
        ``num_items``, ``metrics`` by name (with ``_stderr`` for means), ``seconds``,
        ``batch_size``.

    Raises:
        ValueError: numbers below 1, or a prompt that does not fit the model.
    """
    for name, value in (("limit", 1 if limit is None else limit), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    lm: Any = UntruncatedLM(model, tokenizer, batch_size=batch_size, progress=progress)
    begun = time.perf_counter()
    with nullcontext() if progress is None else redirect_stderr(io.StringIO()):
        run: Any = evaluate  # whose decorator hides its signature
        found = run(
            lm=lm,
            task_dict={"tasks": {task.task_name: task}, "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=0,  # standard errors of means have a closed form, below
        )
    samples, aggregation = found["samples"][task.task_name], task.aggregation()
    return {
        "num_items": len({sample["doc_id"] for sample in samples}),
        "metrics": _metrics(found["results"][task.task_name], samples, aggregation or {}),
        "seconds": round(time.perf_counter() - begun, 2),
        "batch_size": batch_size,
    }


def _metrics(
    scores: dict[str, Any], samples: list[dict[str, Any]], aggregation: dict[str, Any]
) -> dict[str, float | None]:
    """The scores under the names ``metric`` or, of several filters, ``metric,filter``."""
    metrics = {}
    for key, score in scores.items():
        metric, _, chosen = key.partition(",")
        if metric not in aggregation:
            continue
        name = metric if chosen == "none" else key
        metrics[name] = _number(score)
        values = [sample[metric] for sample in samples if sample["filter"] == chosen]
        if aggregation[metric] is mean and len(values) > 1:
            metrics[f"{name}_stderr"] = _number(mean_stderr(values))
    return metrics


def _number(score: Any) -> float | None:
    """JSON has no NaN and no infinities."""
    return float(score) if math.isfinite(score) else None


def evaluate_tasks(
    source: str,
    tasks: dict[str, Task],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    output: Path | None = None,
    again: bool = False,
    progress: Progress | None = None,
    known: Known | None = None,
) -> list[dict[str, Any]]:
    """Measure a saved model on tasks.

    Results go into the output file, else into the run file of a run, else nowhere. What is there
    already, of the same weights, items and versions, is not measured again.

    Args:
        source: a run folder, a folder of a model of transformers, or a name on the hub.
        tasks: of :func:`~ovq.harness.items.load_tasks`.
        limit: the first items of each task only; ``None`` for all.
        batch_size: prompts in one forward call; changes no score.
        output: a JSON file, of this model or of several.
        again: measure everything, in place of the older results.
        progress: called after every forward call.
        known: called with the number of tasks that are not measured again.

    Returns:
        One dictionary a task: what :func:`measure_task` returns, ``model``, ``task``, ``limit``,
        ``items`` (where they are from) and ``conditions``.

    Raises:
        ValueError: as :func:`~ovq.harness.language_model.load_model` and :func:`measure_task`; an
            output that cannot be written to.
    """
    folder = model_folder(source)
    place = check_place(source, output)
    kept = [] if again or place is None else read_results(place)
    # A run file is of one model, wherever its folder is.
    of_model = {"model": source} if output is not None else {}
    wanted = [of_model | _about(folder, name, task, limit) for name, task in tasks.items()]
    found = {about["task"]: result for about in wanted for result in kept if _same(about, result)}
    if known is not None and found:
        known(len(found), len(tasks))
    results, loaded = [], None
    for about in wanted:
        name = about["task"]
        if name not in found:
            model, tokenizer = loaded = loaded or load_model(source)
            found[name] = about | measure_task(
                model, tokenizer, tasks[name], limit=limit, batch_size=batch_size,
                progress=None if progress is None else partial(progress, name),
            )  # fmt: skip
            if place is not None:
                keep(place, found[name])
        results.append({"model": source} | found[name])
    return results


def _about(folder: Path | None, name: str, task: Task, limit: int | None) -> dict[str, Any]:
    """What is measured, and all that the result depends on."""
    here = environment()
    return {
        "task": name,
        "limit": limit,
        "items": _items(task),
        "conditions": {
            "model_sha256": None if folder is None else _model_digest(folder),
            "versions": here["versions"] | {"lm-eval": version("lm-eval")},
            "task_version": task.VERSION,
            "device": here["device"],
        },
    }


def _model_digest(folder: Path) -> str:
    """One digest of weights, configuration and tokenizer."""
    kinds = (".safetensors", ".json")
    files = {name: sha for name, sha in digests(folder).items() if name.endswith(kinds)}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _items(task: Task) -> dict[str, Any]:
    """Where the items of a task are from."""
    config: Any = task.config
    data = (config.metadata or {}).get("data")
    file = (config.dataset_kwargs or {}).get("file")
    if data and file:
        return {"file": file, "sha256": digest(Path(data, file))}
    return {"dataset": config.dataset_path, "name": config.dataset_name}


def _same(about: dict[str, Any], result: dict[str, Any]) -> bool:
    return all(result.get(name) == value for name, value in about.items())
