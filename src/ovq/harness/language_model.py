"""lm-eval's Hugging Face model, refusing what it would cut short."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ovq.loading import load_run
from ovq.runs import MODEL_FOLDER, RUN_FILE, read_run

# Called with sequences scored and those in all.
RequestProgress = Callable[[int, int], None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


_HFLM: Any = HFLM  # whose decorator hides what it is


class UntruncatedLM(_HFLM):
    """A model and its tokenizer as lm-eval wants them; a prompt that does not fit is an error.

    lm-eval itself drops the prompt's beginning and logs a warning. Without a token for the begin of
    a text, or its end, a line end stands before empty prompts.

    Args:
        model: of transformers, in memory.
        tokenizer: its own.
        batch_size: prompts in one forward call; changes no score.
        progress: called after every such call.

    Raises:
        ValueError: at a prompt that has more tokens than the model's ``max_position_embeddings``,
            or leaves no room for what is to be generated.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 8,
        progress: RequestProgress | None = None,
    ):
        begin = tokenizer.bos_token_id is None and tokenizer.eos_token_id is None
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            prefix_token_id=tokenizer.encode("\n")[-1] if begin else None,
        )
        self.progress = progress
        self.done = self.total = 0

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-probabilities of continuations, without lm-eval's progress bars."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            self._check_fits(len(context) + len(continuation) - 1, self.max_length)  # all but last
        self.done, self.total = 0, len(requests)
        scores = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        self._advance(self.total - self.done)  # what shared a forward call with another
        return scores

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Token ids ``[B, T]`` of prompts to go on from, and their mask."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len is not None:
            self._check_fits(ids.shape[1], left_truncate_len)
        return ids, mask

    def _check_fits(self, num_tokens: int, most: int) -> None:
        if num_tokens > most:
            raise ValueError(
                f"prompts must have at most {most:,} tokens, max_position_embeddings less what is "
                f"generated, got {num_tokens:,}"
            )

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        logits = super()._model_call(inps, attn_mask, labels)
        self._advance(inps.shape[0])
        return logits

    def _advance(self, num_sequences: int) -> None:
        self.done += num_sequences
        if self.progress is not None and self.total and num_sequences:
            self.progress(min(self.done, self.total), self.total)


def model_folder(source: str) -> Path | None:
    """Where a run, or a folder of a model, holds its files; ``None`` for a name on the hub.

    Raises:
        ValueError: a folder, or a file, without a model.
    """
    folder = Path(source)
    for place in (folder / MODEL_FOLDER, folder):
        if (place / "config.json").is_file():
            return place
    if (folder / RUN_FILE).is_file():
        status = read_run(folder)["status"]
        raise ValueError(f"RUN must be done, got {source} with status {status!r}")
    if folder.exists() or source.count("/") > 1:
        raise ValueError(
            f"RUN must be a run, a folder with a model of transformers, or the name of one on the "
            f"hub, got {source}"
        )
    return None


def load_model(source: str) -> tuple[Any, Any]:
    """A model, in float32 and evaluation mode, and its tokenizer.

    Args:
        source: a run folder, a folder of a model of transformers, or a name on the hub.

    Raises:
        ValueError: neither; a run that is not done or damaged; no tokenizer.
    """
    folder = model_folder(source)
    place = source if folder is None else str(folder)
    if folder is not None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"RUN must have a tokenizer, as those trained on text have, got {folder} without"
        )
    try:
        if (Path(source) / RUN_FILE).is_file() and "task" in read_run(Path(source))["config"]:
            model: Any = load_run(Path(source))[1]
        else:
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True
            )
        tokenizer = AutoTokenizer.from_pretrained(place)
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"RUN must hold a model or name one, got {source}: {first}") from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), tokenizer
