"""Train a model on a task with ``transformers.Trainer``, in a folder that can be resumed.

Under ``torchrun`` the processes share each step's sequences, and the first of them writes.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import Sampler, SequentialSampler, default_collate

try:
    import transformers
    from accelerate import PartialState
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

from ovq.loading import save_model
from ovq.models import OVQForCausalLM, OVQForRegression
from ovq.run_config import RunConfig, environment, model_class, model_config
from ovq.runs import (
    LOCK_FILE,
    MODEL_FOLDER,
    RUN_FILE,
    check_data,
    check_output_folder,
    command_line,
    digests,
    read_run,
    weights_digests,
    write_run,
    write_text,
)
from ovq.tasks import (
    IGNORED,
    LanguageModelingTask,
    ShortFirst,
    Split,
    Task,
    TaskDataset,
    check_seed,
)
from ovq.tasks.tokenization import END_OF_TEXT, with_end_of_text

CHECKPOINT_FOLDER = "checkpoints"
DIGESTS_FILE = "sha256.json"  # of every other file of a checkpoint
CHECKPOINTING = "activation_checkpointing"  # its name in newer versions of transformers
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"
LONGEST_WAIT = timedelta(days=2)  # of one process for another


class BusyError(ValueError):
    """Another process is at work in the folder."""


# Called after every step with steps done, steps in all, the loss, and tokens per second.
Progress = Callable[[int, int, float, float], None]


def processes() -> PartialState:
    """The processes that ``torchrun`` started, connected; without it there is this one."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)


def make_model(config: RunConfig) -> OVQForCausalLM | OVQForRegression:
    """The untrained model of a run; its weights follow from the seed.

    Raises:
        ValueError: a field of the model, or the seed, out of its range; a name to freeze that no
            parameter has.
    """
    check_seed(config.training.seed, 2**32)  # NumPy takes no other
    set_seed(config.training.seed)
    cls: Any = model_class(config.task)
    model = cls(model_config(config.task, config.model))
    for last in config.training.frozen:
        found = [x for name, x in model.named_parameters() if name.split(".")[-1] == last]
        if not found:
            raise ValueError(f"frozen must hold last parts of parameters' names, got {last!r}")
        for parameter in found:
            parameter.requires_grad_(False)
    return model


def training_data(config: RunConfig) -> TaskDataset | ShortFirst:
    """The sequences that a run is trained on, in their order.

    Raises:
        ValueError: a ``short_length`` at which there is no such task.
    """
    training = config.training
    fields: dict[str, Any] = {
        "num_sequences": training.num_steps * training.batch_size,
        "seed": training.seed,
        "split": Split.TRAIN,
        "curriculum": training.curriculum,
    }
    if training.short_length is None:
        return TaskDataset(config.task, **fields)
    return ShortFirst(
        config.task,
        num_short=training.num_short_steps * training.batch_size,
        short_length=training.short_length,
        **fields,
    )


def collate(
    items: Sequence[dict[str, Tensor] | list[dict[str, Tensor]]],
) -> dict[str, Tensor]:
    """Stack examples; where few tokens are labelled, ask the model for their logits alone.

    Args:
        items: examples of a task, see :class:`~ovq.tasks.Task`, or lists of them.

    Returns:
        Their tensors by name. If some position has a label in no row, ``logits_to_keep`` holds the
        ``P`` positions before labels, and the last one; ``labels`` ``[B, P + 1]`` are those of the
        tokens after them, shifted by one as the model expects: the loss is the same.

    >>> example = {"input_ids": torch.arange(5), "labels": torch.tensor([-100, -100, 2, -100, 4])}
    >>> batch = collate([example])
    >>> batch["logits_to_keep"].tolist(), batch["labels"].tolist()
    ([1, 3, 4], [[-100, 2, 4]])
    """
    several = [item if isinstance(item, list) else [item] for item in items]
    batch = default_collate([example for examples in several for example in examples])
    if "labels" not in batch:
        return batch
    following = batch["labels"][:, 1:]
    places = (following != IGNORED).any(0).nonzero()[:, 0]
    if len(places) < following.shape[1]:
        nothing = torch.full_like(following[:, :1], IGNORED)
        batch["labels"] = torch.cat([nothing, following[:, places]], dim=1)
        batch["logits_to_keep"] = torch.cat([places, places.new_tensor([following.shape[1]])])
    return batch


def train(config: RunConfig, folder: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Train a run in its folder, or go on where an interrupted one stopped.

    Ctrl-C ends the run after the step at hand, with a checkpoint; the same call resumes it, to the
    losses of an uninterrupted run. Under ``torchrun`` every process makes this call.

    Args:
        config: of the run.
        folder: of the run; made if it is not there.
        progress: called after every step.

    Returns:
        The run file's content; its ``status`` is ``"done"`` or ``"interrupted"``.

    Raises:
        BusyError: another process is training it.
        ValueError: the folder holds a run of another configuration, or files that are no run; the
            text has changed since the run began; a checkpoint is damaged; a number of sequences
            that the processes cannot share.
    """
    check_seed(config.training.seed, 2**32)
    _check_shares(config)
    data = training_data(config)
    started = _check_folder(config, folder)
    if started and started["status"] == "done":
        if not (folder / MODEL_FOLDER / "model.safetensors").is_file():
            raise ValueError(f"--output must hold the model of its run, got {folder} without one")
        return started
    config.task.prepare()
    if started:
        check_data(started, config.task.fingerprint())
    folder.mkdir(parents=True, exist_ok=True)
    first = processes().is_main_process
    try:
        with FileLock(folder / LOCK_FILE).acquire(timeout=0) if first else nullcontext():
            return _train(config, data, folder, progress, started)
    except Timeout:
        raise BusyError(
            f"--output must be a folder that no run is training in, got {folder}"
        ) from None


def _train(
    config: RunConfig,
    data: TaskDataset | ShortFirst,
    folder: Path,
    progress: Progress | None,
    started: dict[str, Any] | None,
) -> dict[str, Any]:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    model = make_model(config)
    # A tied weight is saved once: reading a checkpoint back, the trainer is not to miss the other.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
    run = started or {
        "config": config.to_dict(),
        "command": command_line(),
        "seed": config.training.seed,
        "num_parameters": model.num_parameters(),
        "data": config.task.fingerprint(),
        "seconds": 0.0,
        **environment(),
    }
    run["status"], before = "running", run.get("training", {})
    first = processes().is_main_process
    processes().wait_for_everyone()  # all have read what the first one now changes
    if first:
        write_run(folder, run)
    watch = _Watch(config, progress if first else None)
    trainer = _Trainer(
        model=model,
        args=_arguments(config, folder),
        train_dataset=data,
        data_collator=collate,
        callbacks=[watch, _Identity(config, model)],
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
        "tokens_per_second": watch.tokens_per_second or before.get("tokens_per_second", 0.0),
    }
    run["status"] = "interrupted" if watch.interrupted else "done"
    if first:
        _finish(config, folder, model, run)
    processes().wait_for_everyone()
    return read_run(folder)


def _finish(
    config: RunConfig, folder: Path, model: OVQForCausalLM | OVQForRegression, run: dict[str, Any]
) -> None:
    """Write the run file, and the model in place of the checkpoints if training is done."""
    if run["status"] == "done":
        save_model(model, _tokenizer(config.task), folder / MODEL_FOLDER)
        run["weights"] = weights_digests(folder)
    write_run(folder, run)
    if run["status"] == "done":
        shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)


def _tokenizer(task: Task) -> PreTrainedTokenizerFast | None:
    """What a model's folder has for its texts, if it was trained on texts."""
    if not isinstance(task, LanguageModelingTask):
        return None
    return PreTrainedTokenizerFast(
        tokenizer_object=with_end_of_text(task.load_tokenizer()),
        bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT,
    )  # fmt: skip


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
    if not (folder / RUN_FILE).exists():  # which is written before the first checkpoint
        if folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise ValueError(f"--output must be a new or empty folder or a run, got {folder}")
        return None
    run = read_run(folder)
    config.check_is_of(run, folder)
    return run


def _check_shares(config: RunConfig) -> int:
    """Sequences that a process takes at a time."""
    training = config.training
    parts = processes().num_processes * training.accumulation_steps
    if training.batch_size % parts:
        raise ValueError(
            f"batch_size must be a multiple of processes times accumulation_steps = {parts}, got "
            f"{training.batch_size}"
        )
    return training.batch_size // parts


def _arguments(config: RunConfig, folder: Path) -> TrainingArguments:
    training = config.training
    checkpointing: dict[str, Any] = {CHECKPOINTING: True} if training.gradient_checkpointing else {}
    arguments = TrainingArguments(
        output_dir=str(folder / CHECKPOINT_FOLDER / "partial"),
        max_steps=training.num_steps,
        per_device_train_batch_size=_check_shares(config),
        gradient_accumulation_steps=training.accumulation_steps,
        **checkpointing,
        bf16=training.bf16,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        lr_scheduler_type="cosine",
        weight_decay=training.weight_decay,
        adam_beta2=training.adam_beta2,
        save_steps=training.save_every,
        logging_steps=1,
        logging_nan_inf_filter=False,
        seed=training.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_timeout=int(LONGEST_WAIT.total_seconds()),
        ddp_broadcast_buffers=False,  # codebooks keep in step by themselves
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # a process has one device, with torchrun or without
    return arguments


class _Trainer(Trainer):
    """The library's trainer, reading examples in order and renaming checkpoints into place."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        partial = Path(self._get_output_dir(trial))
        step = self.state.global_step
        processes().wait_for_everyone()  # each has written its part
        if processes().is_main_process:
            self._put_in_place(partial, step)
        processes().wait_for_everyone()

    def _put_in_place(self, partial: Path, step: int) -> None:
        saved = partial / f"checkpoint-{step}"
        write_text(saved / DIGESTS_FILE, json.dumps(digests(saved), indent=1))
        place = partial.parent / f"step-{step}"
        shutil.rmtree(place, ignore_errors=True)
        os.replace(saved, place)
        for older in partial.parent.glob("step-*"):
            if older != place:
                shutil.rmtree(older)


def num_tokens(config: RunConfig, num_steps: int) -> int:
    """Tokens of the first so many steps of a run."""
    tokens = 0
    for steps, parts, task in config.stages:
        done = min(steps, num_steps)
        tokens += done * parts * task.sequence_length
        num_steps -= done
    return config.training.batch_size * tokens


class _Watch(TrainerCallback):
    """Shows progress, and turns Ctrl-C into a checkpoint at the end of the step."""

    def __init__(self, config: RunConfig, progress: Progress | None):
        self.config = config
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
        if distributed.is_available() and distributed.is_initialized():
            heard = torch.tensor(float(self.interrupted), device=args.device)
            distributed.all_reduce(heard)
            self.interrupted = bool(heard)
        if self.interrupted:
            control.should_save = control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = state.log_history[-1].get("loss")
        if loss is None:  # the log of the end, without a step
            return
        seconds = time.perf_counter() - self.begun
        tokens = num_tokens(self.config, state.global_step) - num_tokens(
            self.config, self.first_step
        )
        self.tokens_per_second = round(tokens / seconds, 1)
        if self.progress is not None:
            self.progress(state.global_step, state.max_steps, loss, self.tokens_per_second)


class _Identity(TrainerCallback):
    """Keeps the layers that start as the identity from learning until it is their turn."""

    def __init__(self, config: RunConfig, model: OVQForCausalLM | OVQForRegression):
        layers = model.model.layers[: model.config.num_identity_layers]
        self.parameters = list(layers.parameters())
        self.num_steps = round(config.training.identity_fraction * config.training.num_steps)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step < self.num_steps:
            for parameter in self.parameters:
                parameter.grad = None  # the optimizer leaves such a one alone


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
        if self.watch.interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.watch.interrupted = True
