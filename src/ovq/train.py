"""Train a model on a task with ``transformers.Trainer``, in a folder that can be resumed."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

try:
    import transformers
    from filelock import FileLock, Timeout
    from transformers import (
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
        set_seed,
    )
except ImportError as error:
    raise ImportError(f"ovq.train needs {error.name or error}: pip install 'ovq[train]'") from error

from ovq.models import OVQConfig, OVQForCausalLM
from ovq.run_config import RunConfig, environment
from ovq.runs import (
    MODEL_FOLDER,
    RUN_FILE,
    check_data,
    check_output_folder,
    digests,
    read_run,
    weights_digests,
    write_run,
    write_text,
)
from ovq.tasks import LanguageModelingTask, Split, Task, TaskDataset, check_seed
from ovq.tasks.corpus import KJV
from ovq.tasks.tokenization import END_OF_TEXT, with_end_of_text

CHECKPOINT_FOLDER = "checkpoints"
DIGESTS_FILE = "sha256.json"  # of every other file of a checkpoint
LOCK_FILE = ".lock"  # held while a run trains; a killed process lets go of it

# Called after every step with steps done, steps in all, the loss, and tokens per second.
Progress = Callable[[int, int, float, float], None]


def make_model(config: RunConfig) -> OVQForCausalLM:
    """The untrained model of a run; its weights follow from the seed.

    Raises:
        ValueError: a field of the model, or the seed, out of its range.
    """
    check_seed(config.training.seed, 2**32)  # NumPy takes no other
    set_seed(config.training.seed)
    return OVQForCausalLM(OVQConfig(vocab_size=config.task.vocab_size, **config.model))


def train(config: RunConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Train a run in its folder, or go on where an interrupted one stopped.

    Ctrl-C ends the run after the step at hand, with a checkpoint; the same call resumes it, to the
    losses of an uninterrupted run.

    Args:
        config: of the run.
        folder: of the run; made if it is not there.
        progress: called after every step.

    Returns:
        The run file's content; its ``status`` is ``"done"`` or ``"interrupted"``.

    Raises:
        ValueError: the folder holds a run of another configuration, or files that are no run; the
            text has changed since the run began; a checkpoint is damaged.
    """
    check_seed(config.training.seed, 2**32)
    started = _check_folder(config, folder)
    if started and started["status"] == "done":
        if not (folder / MODEL_FOLDER / "model.safetensors").is_file():
            raise ValueError(f"--output must hold the model of its run, got {folder} without one")
        return started
    config.task.prepare()
    if started:
        check_data(started, config.task.fingerprint())
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        with lock.acquire(timeout=0):
            return _train(config, folder, progress, started)
    except Timeout:
        raise ValueError(
            f"--output must be a folder that no run is training in, got {folder}"
        ) from None


def _train(
    config: RunConfig, folder: Path, progress: Progress | None, started: dict[str, Any] | None
) -> dict[str, Any]:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    model = make_model(config)
    run = started or {
        "config": config.to_dict(),
        "command": " ".join(["ovq", *sys.argv[1:]]) if "ovq" in Path(sys.argv[0]).name else None,
        "seed": config.training.seed,
        "num_parameters": model.num_parameters(),
        "data": config.task.fingerprint(),
        "seconds": 0.0,
        **environment(),
    }
    run["status"] = "running"
    write_run(folder, run)
    watch = _Watch(config, progress)
    trainer = _Trainer(
        model=model,
        args=_arguments(config, folder),
        train_dataset=TaskDataset(
            config.task,
            num_sequences=config.training.num_steps * config.training.batch_size,
            seed=config.training.seed,
            split=Split.TRAIN,
            curriculum=config.training.curriculum,
        ),
        callbacks=[watch],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    begun = time.perf_counter()
    with watch.listening():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    run["seconds"] += time.perf_counter() - begun
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    run["training"] = {
        "steps": trainer.state.global_step,
        "losses": losses,
        "tokens_per_second": watch.tokens_per_second,
    }
    if watch.interrupted:
        run["status"] = "interrupted"
    else:
        save_model(model, config.task, folder / MODEL_FOLDER)
        run["weights"] = weights_digests(folder)
        run["status"] = "done"
    write_run(folder, run)
    if run["status"] == "done":
        shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)
    return read_run(folder)


def save_model(model: OVQForCausalLM, task: Task, folder: Path) -> None:
    """Write model and tokenizer into a folder, beside it first, then renamed onto it."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    if isinstance(task, LanguageModelingTask):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=with_end_of_text(task.load_tokenizer()),
            bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
        )  # fmt: skip
        tokenizer.save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    found = (folder / CHECKPOINT_FOLDER).glob("step-[0-9]*")
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def check_checkpoint(folder: Path) -> None:
    """Raise a ``ValueError`` that names the file unless all files are as they were written."""
    after = f"delete {folder}, and the same command trains from the start"
    try:
        told = json.loads((folder / DIGESTS_FILE).read_bytes())
    except (OSError, ValueError):
        told = {}
    if not isinstance(told, dict) or not told:
        raise ValueError(f"checkpoint must hold a whole {DIGESTS_FILE}, got none: {after}")
    found = digests(folder)
    for name, sha in told.items():
        if found.get(name) != sha:
            state = "damaged" if name in found else "missing"
            raise ValueError(f"checkpoint must be whole, got {state} {folder / name}: {after}")


def _check_folder(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The run file of a run to resume; ``None`` for a new run."""
    check_output_folder(folder)
    if not (folder / RUN_FILE).exists():
        held = [LOCK_FILE, CHECKPOINT_FOLDER]  # what a run killed before its first write leaves
        if folder.exists() and any(path.name not in held for path in folder.iterdir()):
            raise ValueError(f"--output must be a new or empty folder or a run, got {folder}")
        return None
    run = read_run(folder)
    wanted, found = config.to_dict(), run["config"]
    for part in ("task", "model", "training"):
        for name in sorted(wanted[part].keys() | found[part].keys()):
            ours, theirs = wanted[part].get(name), found[part].get(name)
            if ours != theirs and not (name == "source" and _same_folder(ours, theirs)):
                raise ValueError(
                    f"--output must be a folder without a run of another configuration, got "
                    f"{folder} with {part}.{name} = {theirs!r}, not {ours!r}"
                )
    return run


def _same_folder(one: Any, other: Any) -> bool:
    """Whether two sources are one folder, with and without a slash at the end, say."""
    names = [name for name in (one, other) if isinstance(name, str) and name != KJV]
    return len(names) == 2 and Path(names[0]).resolve() == Path(names[1]).resolve()


def _arguments(config: RunConfig, folder: Path) -> TrainingArguments:
    training = config.training
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINT_FOLDER / "partial"),
        max_steps=training.num_steps,
        per_device_train_batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="cosine",
        weight_decay=training.weight_decay,
        adam_beta2=0.95,
        save_steps=training.save_every,
        logging_steps=1,
        logging_nan_inf_filter=False,
        seed=training.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


class _Trainer(Trainer):
    """The library's trainer, reading examples in order and renaming checkpoints into place."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        partial = Path(self._get_output_dir(trial))
        step = self.state.global_step
        saved = partial / f"checkpoint-{step}"
        write_text(saved / DIGESTS_FILE, json.dumps(digests(saved), indent=1))
        place = partial.parent / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        os.replace(saved, place)
        for older in partial.parent.glob("step-*"):
            if older != place:
                shutil.rmtree(older)


class _Watch(TrainerCallback):
    """Shows progress, and turns Ctrl-C into a checkpoint at the end of the step."""

    def __init__(self, config: RunConfig, progress: Progress | None):
        self.tokens_per_step = config.training.batch_size * config.task.sequence_length
        self.progress = progress
        self.interrupted = False
        self.tokens_per_second = 0.0
        self.first_step = 0
        self.begun = 0.0

    def listening(self) -> "_Interrupts":
        """A context in which Ctrl-C is heard."""
        return _Interrupts(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begun, self.first_step = time.perf_counter(), state.global_step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.interrupted:
            control.should_save = control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps, seconds = state.global_step - self.first_step, time.perf_counter() - self.begun
        self.tokens_per_second = round(steps * self.tokens_per_step / seconds, 1)
        loss = state.log_history[-1].get("loss")
        if loss is not None and self.progress is not None:
            self.progress(state.global_step, state.max_steps, loss, self.tokens_per_second)


class _Interrupts:
    """Hears SIGINT and SIGTERM once; a second SIGINT stops at once, as without it."""

    def __init__(self, watch: _Watch):
        self.watch = watch
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            self.before = {
                s: signal.signal(s, self._heard) for s in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:  # not in the main thread, which alone hears signals
            self.before = {}

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.watch.interrupted:
            raise KeyboardInterrupt
        self.watch.interrupted = True
