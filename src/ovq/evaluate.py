"""Measure a trained run: any context length, any number of centroids, other than trained too."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from ovq.layers.registry import WITH_DICTIONARY
from ovq.loading import load_run
from ovq.measuring import EVALUATION_SEED, VALIDATION_START, Model, measure
from ovq.models import OVQCache, OVQConfig, OVQForCausalLM
from ovq.models.cache import CACHE_FIELD
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.points import Point, dictionary_of
from ovq.reading import PIECE
from ovq.run_config import RunConfig, environment, model_config
from ovq.runs import LOCK_FILE, read_run, write_run
from ovq.tasks import Split, Task, TaskDataset, check_seed, token_task

FIELDS = ("num_centroids", "chunk_size", "rate", "step")  # that a setting changes
# Called after every setting with those done, those in all, and the last result.
Progress = Callable[[int, int, dict[str, Any]], None]
# Called before the first setting with those measured before and those in all, if there are any.
Known = Callable[[int, int], None]


def evaluate(
    folder: Path,
    *,
    lengths: tuple[int, ...] = (),
    num_centroids: tuple[str, ...] = (),
    num_sequences: int | None = None,
    again: bool = False,
    progress: Progress | None = None,
    known: Known | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a run at every length with every number of centroids, see :func:`evaluate_points`.

    Args:
        folder: of a run that is done.
        lengths: context lengths; the recipe's when empty.
        num_centroids: settings, see :class:`Point`; the recipe's when empty.
        num_sequences: at each setting; the recipe's when ``None``.
        again: measure everything, in place of the older results.
        progress: called after every setting.
        known: called with the number of settings that are not measured again.

    Returns:
        As :func:`evaluate_points`.

    Raises:
        ValueError: as :func:`evaluate_points`.
    """
    config, model = load_run(folder)
    chosen = config.evaluation
    points = [
        Point(
            length=length,
            setting=setting,
            num_sequences=chosen.num_sequences if num_sequences is None else num_sequences,
        )
        for length in lengths or chosen.lengths or (config.task.context_length,)
        for setting in num_centroids or chosen.num_centroids or (None,)
    ]
    return _evaluate(folder, config, model, points, again, progress, known)


def evaluate_points(
    folder: Path,
    points: Sequence[Point],
    *,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure a run and add each result to its run file as soon as it is there.

    What the run file holds already is not measured again: the same task, number of centroids and
    number of sequences, with the same seed, versions and device. So the call that was interrupted
    goes on where it stopped.

    Args:
        folder: of a run that is done.
        points: what to measure, each once; models without a dictionary ignore their settings.
        progress: called after every point.

    Returns:
        One dictionary a point: length, num_centroids (``None`` without a dictionary), the setting
        as written, the task's changes if there are any, what :func:`measure` returns, and the
        conditions it was measured under.

    Raises:
        ValueError: as :func:`load_run`; points out of their range; a folder that cannot be written
            to.
    """
    config, model = load_run(folder)
    return _evaluate(folder, config, model, points, progress=progress)


def _evaluate(
    folder: Path,
    config: RunConfig,
    model: Model,
    points: Sequence[Point],
    again: bool = False,
    progress: Progress | None = None,
    known: Known | None = None,
) -> list[dict[str, Any]]:
    places = _places(config.task, model.config, points)
    with _alone_in(folder):
        found = {} if again else _measured(folder)
        num_known = sum(key in found for key, _, _ in places)
        if known is not None and num_known:
            known(num_known, len(places))
        model = model.to(environment()["device"])
        trained = model.config.dictionary  # which `set_dictionary` replaces
        results: list[dict[str, Any]] = []
        for done, (key, about, task) in enumerate(places, start=1):
            if key not in found:
                if about["num_centroids"] is not None:
                    fields = _dictionary_at(about, trained, config.task.context_length)
                    model.set_dictionary(**fields)
                found[key] = measure(model, task, key.num_sequences) | {"conditions": _conditions()}
            results.append(about | found[key])
            _keep(folder, results[-1])
            if progress is not None:
                progress(done, len(places), results[-1])
        return results


def _alone_in(folder: Path) -> FileLock:
    """A context in which no other process writes to the run; it waits until that is so."""
    if not os.access(folder, os.W_OK):
        raise ValueError(f"RUN must be a folder that can be written to, got {folder}")
    return FileLock(folder / LOCK_FILE)


class _Key(NamedTuple):
    """What makes two measurements of a run the same, conditions apart."""

    length: int
    num_centroids: int | None
    chunk_size: int | None
    is_kept: bool
    changes: str
    num_sequences: int

    @classmethod
    def of(cls, result: Mapping[str, Any], num_sequences: int) -> "_Key":
        changes = json.dumps(result.get("changes", {}), sort_keys=True)
        chunk_size = result.get("chunk_size")  # None for the trained one
        return cls(
            result["length"], result["num_centroids"], chunk_size, "step" in result, changes,
            num_sequences,
        )  # fmt: skip


def _about(point: Point, config: OVQConfig) -> dict[str, Any]:
    """What a point asks, in words of the run file; without the number of slots."""
    trained = str(config.dictionary["num_centroids"])
    has_dictionary = not WITH_DICTIONARY.isdisjoint(config.mixer_names)
    setting = (point.setting or trained) if has_dictionary else None
    about = {"length": point.length, "num_centroids": None, "setting": setting}
    return about | ({"changes": dict(point.changes)} if point.changes else {})


def _asked(
    about: Mapping[str, Any], num_sequences: int
) -> tuple[int, str | None, dict[str, Any], int]:
    return about["length"], about["setting"], about.get("changes", {}), num_sequences


def _places(
    trained: Task, config: OVQConfig, points: Sequence[Point]
) -> list[tuple[_Key, dict[str, Any], Task]]:
    """Each distinct point: what makes it known, what it is in words of the run file, its task."""
    places: list[tuple[_Key, dict[str, Any], Task]] = []
    for point in points:
        if not 1 <= point.num_sequences <= VALIDATION_START:
            raise ValueError(f"num_sequences must be at least 1, got {point.num_sequences}")
        about, task = _about(point, config), point.task_of(trained)
        if about["setting"] is not None:
            about |= dictionary_of(about["setting"], config, task)
        place = (_Key.of(about, point.num_sequences), about, task)
        if place not in places:  # tells settings apart that mean the same number
            places.append(place)
    return places


def validate(folder: Path, *, num_sequences: int = 256) -> dict[str, Any]:
    """Loss on data that was not trained on and is never evaluated, for choosing among runs.

    The task is as it was at the end of training, the dictionary as it was trained. The result goes
    into the run file under ``validation``, and is not measured twice.

    Args:
        folder: of a run that is done.
        num_sequences: to measure on.

    Returns:
        As :func:`measure`, and the conditions it was measured under.

    Raises:
        ValueError: as :func:`load_run`.
    """
    with _alone_in(folder):
        run = read_run(folder)
        found = run.get("validation", {})
        if (found.get("conditions"), found.get("num_sequences")) == (_conditions(), num_sequences):
            return found
        config, model = load_run(folder)
        model, task = model.to(environment()["device"]), config.task.without_curriculum()
        found = measure(model, task, num_sequences, first=VALIDATION_START)
        write_run(folder, run | {"validation": found | {"conditions": _conditions()}})
        return read_run(folder)["validation"]


def unmeasured(run: Mapping[str, Any], points: Sequence[Point]) -> list[Point]:
    """The points that a run's file, as :func:`ovq.runs.read_run` reads it, has no result for."""
    config = RunConfig.from_dict(run["config"])
    shape = model_config(config.task, config.model)
    found = [
        _asked(result, result["num_sequences"])
        for result in run.get("evaluation", {}).get("results", [])
        if result.get("conditions") == _conditions()
    ]
    return [p for p in points if _asked(_about(p, shape), p.num_sequences) not in found]


def _conditions() -> dict[str, Any]:
    """What else a result depends on, beside its setting and the run."""
    here = environment()
    return {"seed": EVALUATION_SEED, "versions": here["versions"], "device": here["device"]}


def _measured(folder: Path) -> dict[_Key, dict[str, Any]]:
    """The results of the run file that were measured as they would be now."""
    return {
        _Key.of(result, result["num_sequences"]): {
            name: value
            for name, value in result.items()
            if name not in ("length", "setting", "changes", *FIELDS)
        }
        for result in read_run(folder).get("evaluation", {}).get("results", [])
        if result.get("conditions") == _conditions()
    }


def _keep(folder: Path, result: dict[str, Any]) -> None:
    """Add a result to the run file, in place of an older one that was asked the same."""
    run = read_run(folder)
    results = [
        other
        for other in run.get("evaluation", {}).get("results", [])
        if _asked(other, other["num_sequences"]) != _asked(result, result["num_sequences"])
    ]
    ordered = sorted([*results, result], key=lambda r: (r["length"], r["num_centroids"] or 0))
    run["evaluation"] = {"seed": EVALUATION_SEED, **environment(), "results": ordered}
    write_run(folder, run)


def _dictionary_at(
    about: Mapping[str, Any], trained: Mapping[str, Any], trained_length: int
) -> dict[str, Any]:
    """The fields to set for a point: as trained unless it says otherwise.

    Linear growth reaches its end where it did in training, in proportion to the context.
    """
    default = {name: getattr(DictionaryConfig, name) for name in ("rate", "step")}
    fields = {name: {**default, **trained, **about}[name] for name in FIELDS}
    if trained.get("growth_length"):
        fields["growth_length"] = trained["growth_length"] * about["length"] // trained_length
    return fields


@torch.no_grad()
def generate(
    model: OVQForCausalLM,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
    cache: OVQCache | None = None,
    next_logits: Tensor | None = None,
) -> tuple[list[int], int, int]:
    """Continue a prompt, or what was read before it.

    Args:
        model: in evaluation mode.
        prompt: ``[T]`` token ids, at least one unless ``next_logits`` are given.
        max_new_tokens: tokens to generate.
        temperature: 0 for the likeliest token each time, above 0 for sampling.
        top_k: sample among so many likeliest tokens only.
        seed: of the sampling.
        cache: what the model remembers from before the prompt, one row. It is not changed.
        next_logits: of the first token after it, ``[1, vocab_size]``; an empty prompt needs them.

    Returns:
        The new token ids, the bytes of state after the prompt, and those at the end.

    Raises:
        ValueError: an empty prompt with no logits to go on from, or a number out of its range.
    """
    if prompt.numel() == 0 and (cache is None or next_logits is None):
        raise ValueError("prompt must hold at least one token without a state to go on from")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    check_seed(seed, 2**63)
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    torch.manual_seed(seed)
    state_bytes: list[int] = []
    first: list[int] = []
    if prompt.numel() == 0 and cache is not None and next_logits is not None:
        first = [_chosen(next_logits, temperature, top_k)]
        state_bytes, prompt = [cache.num_bytes], torch.tensor(first)
    if max_new_tokens == len(first):
        return first, state_bytes[0], state_bytes[0]

    def note_state(module: OVQForCausalLM, inputs: tuple, output: Any) -> None:
        held = getattr(output, "cache", None) or output.past_key_values
        if isinstance(held, OVQCache):
            state_bytes.append(held.num_bytes)

    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
    before = {} if cache is None else {CACHE_FIELD: cache.as_prefix()}
    hook = model.register_forward_hook(note_state)
    try:
        ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            prompt[None].to(model.device), max_new_tokens=max_new_tokens - len(first),
            eos_token_id=None, prefill_chunk_size=PIECE, **before,
            **(sampling if temperature > 0 else {"do_sample": False}),
        )  # fmt: skip
    finally:
        hook.remove()
    return first + ids[0, prompt.numel() :].tolist(), state_bytes[0], state_bytes[-1]


def _chosen(logits: Tensor, temperature: float, top_k: int | None) -> int:
    """The next token by its logits ``[1, vocab_size]``, as the library's sampling chooses it."""
    if temperature == 0.0:
        return int(logits.argmax(-1))
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    scores = warpers(torch.empty(1, 0, dtype=torch.int64), logits.float())
    return int(torch.multinomial(scores.softmax(-1), num_samples=1))


def held_out_tokens(task: Task, num_tokens: int) -> Tensor:
    """The context of a sequence of the evaluation split, ``[num_tokens]`` ids.

    Raises:
        ValueError: the task has no such length, or no tokens.
    """
    longer = token_task(task).without_curriculum().with_length(num_tokens)
    dataset = TaskDataset(
        longer, num_sequences=1, seed=EVALUATION_SEED, split=Split.EVALUATE
    )  # fmt: skip
    return dataset[0]["input_ids"][:num_tokens]
