"""Measure a trained run: any context length, any number of centroids, other than trained too."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

try:
    from safetensors import SafetensorError
except ImportError as error:
    raise ImportError(
        f"ovq.evaluate needs {error.name or error}: pip install 'ovq[models]'"
    ) from error

from ovq.models import OVQCache, OVQForCausalLM
from ovq.models.cache import CACHE_FIELD
from ovq.reading import PIECE
from ovq.run_config import RunConfig, environment
from ovq.runs import MODEL_FOLDER, check_data, check_weights, read_run, write_run
from ovq.tasks import Split, Task, TaskDataset, check_seed

# Evaluation data has a seed of its own; the split keeps it apart from the training data anyway.
EVALUATION_SEED = 1
TOKENS_PER_BATCH = 32_768

# Called after every setting with those done, those in all, and the last result.
Progress = Callable[[int, int, dict[str, Any]], None]
# Called before the first setting with those measured before and those in all, if there are any.
Known = Callable[[int, int], None]


def load_run(folder: Path) -> tuple[RunConfig, OVQForCausalLM]:
    """The configuration and the trained model of a run folder, ready to evaluate.

    Raises:
        ValueError: no run, one that is not done, one whose model is damaged or another's, or one
            that was trained on a text that has changed since.
    """
    run = read_run(folder)
    config = RunConfig.from_dict(run["config"])
    if run["status"] != "done":
        raise ValueError(f"RUN must be done, got {folder} with status {run['status']!r}")
    try:
        loaded: Any = OVQForCausalLM.from_pretrained(
            folder / MODEL_FOLDER, local_files_only=True, output_loading_info=True
        )
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(
            f"RUN must hold a whole model, got {folder / MODEL_FOLDER}: {line}"
        ) from None
    model, found = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(kind):
            raise ValueError(
                f"RUN must hold a whole model, got {folder / MODEL_FOLDER} with "
                f"{kind.replace('_', ' ')} {sorted(map(str, found[kind]))[:3]}"
            )
    for name, value in config.model.items():
        held = getattr(model.config, name, None)
        part = isinstance(value, dict) and isinstance(held, dict) and value.items() <= held.items()
        same = part or value == held
        if not same:
            raise ValueError(
                f"RUN must hold the model of its own configuration, got {folder} with {name} = "
                f"{held!r}, not {value!r}"
            )
    check_weights(folder, run)
    _check_text(run, config.task)
    return config, model.eval()


def _check_text(run: dict[str, Any], task: Task) -> None:
    try:
        found = task.fingerprint()
    except (ValueError, ImportError):
        return  # a prompt may do without it; what does not says so
    check_data(run, found)


def num_centroids_at(setting: str, length: int) -> int:
    """The number that a setting such as ``64`` or ``T/4`` means at a context of ``length`` tokens.

    Raises:
        ValueError: the setting is neither form.

    >>> num_centroids_at("T/4", 128), num_centroids_at("64", 128)
    (32, 64)
    """
    match = re.fullmatch(r"(T/)?([1-9][0-9]*)", setting)
    if match is None:
        raise ValueError(
            f"num_centroids must be a number or a fraction of the context such as T/4, got "
            f"{setting!r}"
        )
    number = int(match[2])
    return max(1, length // number) if match[1] else number


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
    """Evaluate a run and add each result to its run file as soon as it is there.

    What the run file holds already is not measured again: the same length, number of centroids and
    number of sequences, with the same seed, versions and device. So the call that was interrupted
    goes on where it stopped.

    Args:
        folder: of a run that is done.
        lengths: context lengths; the recipe's when empty.
        num_centroids: settings as :func:`num_centroids_at` reads them; the recipe's when empty.
        num_sequences: at each setting; the recipe's when ``None``.
        again: measure everything, in place of the older results.
        progress: called after every setting.
        known: called with the number of settings that are not measured again.

    Returns:
        One dictionary a setting: length, num_centroids (``None`` without a dictionary), the setting
        as written, sequences, loss in nats a labelled token, accuracy, the bytes of state of one
        row at the end, and the conditions it was measured under.

    Raises:
        ValueError: as :func:`load_run`; settings out of their range; a folder that cannot be
            written to.
    """
    config, model = load_run(folder)
    given = replace(
        config.evaluation,
        lengths=lengths or config.evaluation.lengths or (config.task.context_length,),
        num_centroids=num_centroids or config.evaluation.num_centroids,
        num_sequences=config.evaluation.num_sequences if num_sequences is None else num_sequences,
    )
    if given.num_sequences < 1:
        raise ValueError(f"num_sequences must be at least 1, got {given.num_sequences}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"RUN must be a folder that can be written to, got {folder}")
    trained = str(model.config.dictionary["num_centroids"])
    has_dictionary = "ovq" in model.config.mixer_names
    settings = (given.num_centroids or (trained,)) if has_dictionary else (None,)
    lengths, settings = tuple(dict.fromkeys(given.lengths)), tuple(dict.fromkeys(settings))
    trained_task = config.task.without_curriculum()
    tasks = {length: trained_task.with_length(length) for length in lengths}
    places = [
        (length, setting, None if setting is None else num_centroids_at(setting, length))
        for length in lengths
        for setting in settings
    ]
    found = {} if again else _measured(folder, given.num_sequences)
    num_known = sum((length, number) in found for length, _, number in places)
    if known is not None and num_known:
        known(num_known, len(places))
    results: list[dict[str, Any]] = []
    for done, (length, setting, number) in enumerate(places, start=1):
        if (length, number) not in found:
            if number is not None:
                model.set_dictionary(num_centroids=number, **_growth_at(length, config))
            measured = measure(model, tasks[length], given.num_sequences)
            found[length, number] = measured | {"conditions": _conditions()}
        about = {"length": length, "num_centroids": number, "setting": setting}
        results.append(about | found[length, number])
        _keep(folder, results[-1])
        if progress is not None:
            progress(done, len(places), results[-1])
    return results


def _conditions() -> dict[str, Any]:
    """What else a result depends on, beside its setting and the run."""
    here = environment()
    return {"seed": EVALUATION_SEED, "versions": here["versions"], "device": here["device"]}


def _measured(folder: Path, num_sequences: int) -> dict[tuple[int, int | None], dict[str, Any]]:
    """The results of the run file that were measured as they would be now, by setting."""
    return {
        (result["length"], result["num_centroids"]): {
            name: value
            for name, value in result.items()
            if name not in ("length", "num_centroids", "setting")
        }
        for result in read_run(folder).get("evaluation", {}).get("results", [])
        if result.get("conditions") == _conditions() and result["num_sequences"] == num_sequences
    }


def _keep(folder: Path, result: dict[str, Any]) -> None:
    """Add a result to the run file, in place of an older one of the same setting."""
    run = read_run(folder)
    results = [
        other
        for other in run.get("evaluation", {}).get("results", [])
        if (other["length"], other["setting"]) != (result["length"], result["setting"])
    ]
    ordered = sorted([*results, result], key=lambda r: (r["length"], r["num_centroids"] or 0))
    run["evaluation"] = {"seed": EVALUATION_SEED, **environment(), "results": ordered}
    write_run(folder, run)


def _growth_at(length: int, config: RunConfig) -> dict[str, int]:
    """Linear growth reaches its end where it did in training, in proportion to the context."""
    trained = config.model.get("dictionary", {}).get("growth_length")
    return (
        {} if trained is None else {"growth_length": trained * length // config.task.context_length}
    )


@torch.no_grad()
def measure(model: OVQForCausalLM, task: Task, num_sequences: int) -> dict[str, Any]:
    """Loss and accuracy at the labelled tokens of the evaluation split, and the state's bytes."""
    dataset = TaskDataset(
        task, num_sequences=num_sequences, seed=EVALUATION_SEED, split=Split.EVALUATE
    )
    loss = right = labelled = 0.0
    for indices in _batches(num_sequences, task.sequence_length):
        batch = dataset.batch(indices)
        expected = batch["labels"][:, 1:]
        asked = expected != -100
        places = asked.any(0).nonzero()[:, 0]
        logits = model(
            batch["input_ids"].to(model.device), logits_to_keep=places.to(model.device),
            use_cache=False,
        ).logits.cpu()  # fmt: skip
        asked, expected = asked[:, places], expected[:, places]
        loss += cross_entropy(logits[asked].float(), expected[asked], reduction="sum").item()
        right += (logits.argmax(-1) == expected)[asked].sum().item()
        labelled += asked.sum().item()
    return {
        "num_sequences": num_sequences,
        "loss": loss / labelled,
        "accuracy": right / labelled,
        "state_bytes": model.state_size(task.sequence_length),
    }


def _batches(num_sequences: int, length: int) -> Iterator[range]:
    size = max(1, TOKENS_PER_BATCH // length)
    for start in range(0, num_sequences, size):
        yield range(start, min(start + size, num_sequences))


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
        ValueError: the task has no such length.
    """
    longer = task.without_curriculum().with_length(num_tokens)
    dataset = TaskDataset(
        longer, num_sequences=1, seed=EVALUATION_SEED, split=Split.EVALUATE
    )  # fmt: skip
    return dataset[0]["input_ids"][:num_tokens]
