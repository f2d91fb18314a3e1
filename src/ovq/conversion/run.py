"""A converted model as a run folder, in which ``ovq`` finds it as it finds trained ones."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ovq.conversion.distill import Progress, distill, divergence, windows
from ovq.conversion.layers import LayerPlan, parse_pattern
from ovq.conversion.weights import convert, converted_config
from ovq.fidelity.pretrained import files_of, load_pretrained
from ovq.loading import TokenizerCodec, at_start, save_model
from ovq.run_config import environment
from ovq.runs import (
    MODEL_FOLDER,
    RUN_FILE,
    check_data,
    check_output_folder,
    check_weights,
    command_line,
    read_run,
    weights_digests,
    write_run,
)
from ovq.tasks.corpus import KJV, fingerprint, read_corpus


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is made of a pretrained model.

    Attributes:
        pattern: as :func:`~ovq.conversion.layers.parse_pattern` reads it.
        tokens: what a layer's state holds where the pattern does not say.
        num_first_tokens: tokens at the start that stay exact.
        share_of_slots: of the bytes of windowed OVQ layers, what goes to their dictionaries.
        distance: tokens between a query and the dictionary, for its rotary embedding.
        distill_steps: of the fit of the dictionaries' biases; 0 for none.
        distill_length: tokens read in each.
        texts: folder of the ``.txt`` files that are read then; ``None`` without a fit.

    Raises:
        ValueError: a number out of its range, or steps without a text.
    """

    pattern: str
    tokens: int = 1024
    num_first_tokens: int = 4
    share_of_slots: float = 0.25
    distance: int = 2048
    distill_steps: int = 0
    distill_length: int = 4096
    texts: str | None = None

    def __post_init__(self):
        if (self.distill_steps > 0) != (self.texts is not None):
            raise ValueError("distill_steps must be above 0 with texts, and 0 without")
        if not 0.0 < self.share_of_slots < 1.0:
            raise ValueError(f"share_of_slots must lie in (0, 1), got {self.share_of_slots}")
        if not 0 <= self.distance < 2**31:
            raise ValueError(f"distance must lie in [0, 2^31), got {self.distance}")
        held = [layer.tokens or 0 for layer in self.layers if layer.name == "windowed_ovq"]
        if self.distill_steps and held and self.distill_length <= min(held):
            raise ValueError(
                f"distill_length must be more than the {min(held):,} tokens that a state holds, "
                f"got {self.distill_length:,}"
            )

    @property
    def layers(self) -> list[LayerPlan]:
        """The layers of the pattern."""
        return parse_pattern(self.pattern, self.tokens)

    @property
    def num_exact(self) -> int:
        """Tokens after which some layer has forgotten one."""
        return min((layer.tokens for layer in self.layers if layer.tokens), default=0)


def convert_to_run(
    source: str, plan: Conversion, folder: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Convert a pretrained model into a run folder.

    Args:
        source: a folder or a name that transformers loads, a ``.gguf`` file, or a package.
        plan: what is made of it.
        folder: new or empty, or one where the same conversion of the same files was done, which is
            left as it is, or was interrupted.
        progress: called after every step of the distillation.

    Returns:
        The content of the run file.

    Raises:
        ValueError: a source that cannot be read or is no Llama-type model, a pattern or a text that
            does not fit, or a folder that holds something else.
        ImportError: a ``.gguf`` file, and the package gguf is not installed.
    """
    wanted = {"source": source, **asdict(plan)}
    if plan.texts is not None and plan.texts != KJV and not Path(plan.texts).is_dir():
        raise ValueError(f"texts must be {KJV!r} or a folder of .txt files, got {plan.texts}")
    data = files_of(source) | ({} if plan.texts is None else fingerprint(plan.texts))
    done = _check_folder(folder, wanted, data)
    if done is not None:
        return done
    pretrained, tokenizer = load_pretrained(source)
    config = converted_config(
        pretrained.config, plan.layers, num_first_tokens=plan.num_first_tokens,
        share_of_slots=plan.share_of_slots, distance=plan.distance,
    )  # fmt: skip
    model = convert(pretrained, config)
    run: dict[str, Any] = {
        "config": {"name": folder.name, "conversion": wanted, "model": _told(model.config)},
        "command": command_line(),
        "num_parameters": model.num_parameters(),
        "data": data,
        **environment(),
    }
    if plan.texts is not None:
        text = "\n\n".join(text for _, text in read_corpus(plan.texts))
        codec = TokenizerCodec(tokenizer)
        pieces = [
            at_start(codec, ids)[: plan.distill_length]
            for ids in windows(codec.encode(text), plan.distill_length, plan.distill_steps)
        ]
        with torch.no_grad():
            before = divergence(model, pretrained, pieces[0], plan.num_exact).item()
        run["divergences"] = distill(
            model, pretrained, iter(pieces), num_steps=plan.distill_steps,
            first=plan.num_exact, progress=progress,
        )  # fmt: skip
        with torch.no_grad():
            after = divergence(model, pretrained, pieces[0], plan.num_exact).item()
        run["divergence"] = {"before": before, "after": after}  # of the first piece
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder / MODEL_FOLDER)
    run |= {"weights": weights_digests(folder), "status": "done"}
    write_run(folder, run)
    return read_run(folder)


def _check_folder(
    folder: Path, wanted: dict[str, Any], data: dict[str, dict[str, Any]]
) -> dict[str, Any] | None:
    """The run file of the same conversion; ``None`` for a folder to be filled."""
    check_output_folder(folder)
    if (folder / RUN_FILE).exists():
        run = read_run(folder)
        if run["config"].get("conversion") != wanted:
            raise ValueError(
                f"--output must be a folder without a run of another configuration, got {folder}"
            )
        check_data(run, data)
        check_weights(folder, run)
        return run
    left = {MODEL_FOLDER, f".{MODEL_FOLDER}.partial", f".{RUN_FILE}.partial"}  # by a killed process
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if there - left or (MODEL_FOLDER in there and not _is_ours(folder / MODEL_FOLDER)):
        raise ValueError(f"--output must be a new or empty folder or a run, got {folder}")
    return None


def _is_ours(model: Path) -> bool:
    """Whether a folder holds a model of ours, as a conversion leaves it before its run file."""
    try:
        return json.loads((model / "config.json").read_bytes())["model_type"] == "ovq"
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _told(config: Any) -> dict[str, Any]:
    """The fields that a reader of the run file wants, and that loading compares."""
    names = (
        "num_hidden_layers", "layer_pattern", "layer_fields", "num_first_tokens",
        "dictionary_distance", "max_rotary_position", "rope_theta", "dictionary", "rms_norm_eps",
        "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
    )  # fmt: skip
    return {name: getattr(config, name) for name in names}
