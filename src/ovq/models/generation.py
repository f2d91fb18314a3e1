"""How ``generate()`` runs the model: the cache it begins with, what it reads, what it refuses."""

# transformers types `self` in these methods by a protocol that its own models do not meet.
# pyright: reportAttributeAccessIssue=false

from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode, StoppingCriteriaList
from transformers.utils import ModelOutput

from ovq.models.cache import CACHE_FIELD, OVQCache

MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# Each drafts tokens and takes some of them back.
DRAFTING = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


class EndedRows(StoppingCriteriaList):
    """Stopping criteria that remember which rows had ended before their latest token.

    That token is padding then, and must not enter the row's state.

    Attributes:
        before: ``[B]`` bool, or ``None`` if no row had.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.before: Tensor | None = None
        self._now: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows end with the latest token, ``[B]`` bool."""
        ending = super().__call__(cast(LongTensor, input_ids), scores, **kwargs)
        self.before = self._now if self._now is not None and self._now.any() else None
        self._now = ending if self._now is None else self._now | ending
        return ending


class OVQGenerationMixin(PreTrainedModel, GenerationMixin):
    """``generate()`` on an :class:`~ovq.models.OVQCache`, where it differs from other models'.

    The methods are those that transformers calls, in the order of a call of ``generate()``.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """Refuse: every way into continuous batching passes here.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching (cache_implementation='paged', generate_batch) needs a cache in "
            "pages, which the states of the layers are not: call generate() on a padded batch"
        )

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict,
    ) -> None:
        for name in DRAFTING:
            if generation_mode_kwargs.get(name, getattr(generation_config, name, None)):
                raise ValueError(
                    f"{name} must not be given: assisted decoding takes tokens back, and the state "
                    f"of {type(self).__name__} cannot forget what it has read"
                )
        if generation_mode not in MODES:
            raise ValueError(f"generation mode must be one of {MODES}, got {generation_mode.value}")
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                raise ValueError(f"{name} must be False: the model does not return them, got True")
        super()._validate_generation_mode(
            generation_mode, generation_config, generation_mode_kwargs
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put the cache into ``model_kwargs``: the one given, a row a sequence, or an empty one."""
        given = _given_cache(model_kwargs)
        if getattr(generation_config, "is_assistant", False):
            raise ValueError(
                f"assistant_model must be able to take tokens back, got {type(self).__name__}"
            )
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if generation_config.use_cache is False:
            if given is not None:
                raise ValueError("use_cache must be True with a cache, got False")
            return
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if given is not None and copies > 1 and given.num_rows == batch_size:
            given = given.select_rows(torch.arange(batch_size).repeat_interleave(copies))
        model_kwargs[CACHE_FIELD] = OVQCache() if given is None else given

    def _sample(
        self, input_ids: Tensor, *, stopping_criteria: StoppingCriteriaList, **options: Any
    ) -> Any:
        # transformers goes on with padding in rows that ended, if it knows a token that ends them.
        if any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
            stopping_criteria = EndedRows(stopping_criteria)
            options["ended_rows"] = stopping_criteria
        return super()._sample(input_ids, stopping_criteria=stopping_criteria, **options)

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        is_first_iteration: bool = True,
    ) -> ModelOutput:
        """Read what the cache has not read of the prompt, in pieces of ``prefill_chunk_size``."""
        cache = model_kwargs.get(CACHE_FIELD)
        if cache is None:
            return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)
        passed_on = model_kwargs | {"attention_mask": None, "inputs_embeds": None}
        embeds, mask = (model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask"))
        prompt = input_ids if embeds is None else embeds
        # transformers 5.24 drops a mask of ones and leaves its length.
        dropped = getattr(generation_config, "_mask_length", prompt.shape[1])
        num_new = num_unread(
            prompt.shape[1], dropped if mask is None else mask.shape[1], cache.num_columns
        )
        size = generation_config.prefill_chunk_size or num_new
        outputs = ModelOutput()
        for start in range(-num_new, 0, size):
            columns = slice(start, start + size if start + size < 0 else None)
            passed_on[CACHE_FIELD] = cache
            if mask is not None:
                passed_on["attention_mask"] = mask[:, columns]
            if embeds is not None:
                passed_on["inputs_embeds"] = embeds[:, columns]
            inputs = self.prepare_inputs_for_generation(
                input_ids[:, columns], is_first_iteration=is_first_iteration, **passed_on
            )
            outputs = self(**inputs, return_dict=True)
            cache = outputs[CACHE_FIELD]
        return outputs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        ended_rows: EndedRows | None = None,
        tokenizer: Any = None,  # given with stop strings, and passed on to here
        **kwargs: Any,  # by this name transformers knows that forward's arguments may be given
    ) -> dict[str, Any]:
        """The arguments of one call of the model, the latest token masked in rows that ended."""
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        ended = None if ended_rows is None else ended_rows.before
        if ended is not None and inputs.get(CACHE_FIELD) is not None:
            inputs["attention_mask"] = (~ended)[:, None].long()
        return inputs


def num_unread(num_given: int, mask_length: int, num_read: int) -> int:
    """How many of the given columns of a prompt the cache has not read.

    Args:
        num_given: columns of the prompt.
        mask_length: columns of its mask. As many as the prompt has: those read are among them. As
            many as were read and given: the prompt is new.
        num_read: columns that the cache has read.

    Raises:
        ValueError: a mask of another length, or nothing new.
    """
    if mask_length not in (num_given, num_read + num_given):
        raise ValueError(
            f"attention_mask must have {num_given} columns, or {num_read + num_given} with those "
            f"that the cache has read, got {mask_length}"
        )
    num_new = num_given if mask_length != num_given else num_given - num_read
    if num_new < 1 and num_read:
        raise ValueError(
            f"input_ids must begin with the {num_read} columns that the cache has read and go on, "
            f"or come with cache.as_prefix(), which counts anew, got {num_given} columns"
        )
    if num_new < 1:
        raise ValueError("input_ids must hold at least one column, got none")
    return num_new


def _given_cache(model_kwargs: dict) -> OVQCache | None:
    """The caller's cache, taken out under whichever of its names and put back under one."""
    found = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    given = [cache for cache in found if cache is not None]
    if not given:
        return None
    if len(given) == 2 and given[0] is not given[1]:
        raise ValueError("cache and past_key_values must be the same object, got two")
    if not isinstance(given[0], OVQCache):
        raise ValueError(f"cache must be an OVQCache, got {type(given[0]).__name__}")
    model_kwargs[CACHE_FIELD] = given[0]
    return given[0]
