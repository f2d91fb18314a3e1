"""One causal language model for every mixer and every pattern of mixers, on transformers."""

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from ovq.layers import (
    Mixer,
    MixerState,
    OVQAttention,
    WindowedOVQAttention,
    without_padding,
)
from ovq.layers.codebook import Codebook
from ovq.layers.registry import WITH_DICTIONARY
from ovq.layers.short_conv import ShortConvolution
from ovq.models.cache import CACHE_FIELD, OVQCache, one_cache, real_tokens
from ovq.models.configuration_ovq import OVQConfig, dictionary_config
from ovq.models.decoder_layer import STARTS_AT_ZERO, OVQDecoderLayer, OVQRMSNorm
from ovq.models.generation import OVQGenerationMixin

logger = logging.get_logger(__name__)


# transformers annotates the cache with a class of its own, which shape checking insists on.
@no_type_check
@dataclass
class OVQModelOutput(BaseModelOutputWithPast):
    """What the decoder returns.

    Attributes:
        auxiliary_loss: in training, the mean over tokens and layers of what mixers add to the loss;
            ``None`` if none does.
    """

    auxiliary_loss: Tensor | None = None


class OVQPreTrainedModel(PreTrainedModel):
    """What the models share with transformers: configuration, initial weights, capabilities."""

    config: OVQConfig
    config_class = OVQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["OVQDecoderLayer"]
    # A state cannot go back some tokens, so assisted decoding is refused.
    _is_stateful = True

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with the weights copied out of the file.

        transformers maps the file into memory. Its tensors then lie at addresses where matrix
        products may round otherwise than the saved model's did, and change with the file.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for tensor in chain(model.parameters(), model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()
        return loaded

    def _init_weights(self, module: nn.Module) -> None:
        # Functions of `init` skip what a checkpoint has set (flag `_is_hf_initialized`).
        if isinstance(module, nn.Linear | nn.Embedding):
            at_zero = getattr(module, STARTS_AT_ZERO, False)
            init.normal_(module.weight, std=0.0 if at_zero else self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, OVQRMSNorm | nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Mixer | ShortConvolution | Codebook):
            module.init_parameters()


class OVQModel(OVQPreTrainedModel):
    """The decoder without its output layer: token ids in, normalised hidden states out."""

    def __init__(self, config: OVQConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OVQDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = OVQRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: OVQCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: OVQCache | None = None,
    ) -> OVQModelOutput:
        """Hidden states of the tokens, and the state after them.

        Padding is removed before the layers, so that it never enters a state; the hidden states at
        padding are zeros then. Padding on the right alone, with no cache to return, is left in
        place: no real token sees it.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]`` or ``[B, past + T]``, 1 at tokens and 0 at padding.
            cache: what came before, as an earlier call returned it. It is not changed.
            inputs_embeds: ``[B, T, D]`` in place of ``input_ids``.
            use_cache: whether to return the state; ``None`` for the configuration's word, and no
                in training.
            past_key_values: the old name of ``cache``.

        Returns:
            ``last_hidden_state`` ``[B, T, D]``, the cache, under the name that this version of
            transformers has for it, and in training the auxiliary loss of the mixers.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``, a mask that is no
                padding mask, or a cache that does not fit.
        """
        hidden_states = self._embed(input_ids, inputs_embeds)
        B, T = hidden_states.shape[:2]
        cache = one_cache(cache, past_key_values, len(self.layers), B)
        use_cache = self._returns_cache(use_cache)
        real = real_tokens(attention_mask, B, T, cache.num_columns)
        states = cache.states or [None] * len(self.layers)
        gathering = self._gathering_mixers()
        for mixer in gathering:
            mixer.begin_training_forward()
        losses: list[tuple[int, Tensor]] = []
        run = partial(self._run_layers, losses=losses)
        if real is None or (not use_cache and not gathering and _is_right_padding(real)):
            hidden_states, states = run(hidden_states, states)
        else:
            hidden_states, states = without_padding(run, hidden_states, real, states)
        for mixer in gathering:
            mixer.end_training_forward()
        after = OVQCache(states, cache.num_columns + T) if use_cache else None
        return OVQModelOutput(
            last_hidden_state=hidden_states,
            auxiliary_loss=_mean_over_tokens(losses),
            **_cache_field(after),
        )

    def state_size(self, num_tokens: int) -> int:
        """Bytes that the states of one row hold after ``num_tokens`` tokens, over all layers."""
        return sum(m.state_size(num_tokens) for m in self.modules() if isinstance(m, Mixer))

    def set_dictionary(self, **fields: int | float | str | None) -> None:
        """Run the same weights with another dictionary, from the next sequence on.

        Args:
            **fields: fields of :class:`~ovq.ops.ovq_attention.DictionaryConfig` to change, such as
                ``num_centroids``; the others stay.

        Raises:
            ValueError: a field that is unknown or out of its range, or a model without OVQ layers.
        """
        mixers = {
            index: layer.mixer
            for index, layer in enumerate(self.layers)
            if isinstance(layer.mixer, OVQAttention | WindowedOVQAttention)
        }
        if not mixers:
            raise ValueError(
                f"layer_pattern must hold one of {sorted(WITH_DICTIONARY)} to have a dictionary, "
                f"got {self.config.layer_pattern}"
            )
        changed = copy(self.config)
        changed.dictionary = asdict(dictionary_config(self.config.dictionary | fields))
        changed.layer_fields = [
            own | {"dictionary": own["dictionary"] | fields} if "dictionary" in own else own
            for own in self.config.layer_fields
        ]
        dictionaries = {i: dictionary_config(changed.for_layer(i).dictionary) for i in mixers}
        self.config.dictionary = changed.dictionary
        self.config.layer_fields = changed.layer_fields
        for index, mixer in mixers.items():
            mixer.set_dictionary(dictionaries[index])

    def _embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> Float[Tensor, "B T D"]:
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        _check_input_ids(input_ids, self.config.vocab_size)
        return self.embed_tokens(input_ids)

    def _returns_cache(self, use_cache: bool | None) -> bool:
        if use_cache is None:
            return self.config.use_cache and not self.training
        replays = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if use_cache and replays:
            logger.warning_once(
                "use_cache=True does not go with gradient checkpointing: no cache is returned"
            )
            return False
        return use_cache

    def _gathering_mixers(self) -> list[Mixer]:
        """The mixers that learn in this forward by other means than gradients."""
        if not self.training:
            return []
        return [m for m in self.modules() if isinstance(m, Mixer) and m.gathers_statistics]

    def _run_layers(
        self,
        hidden_states: Float[Tensor, "B T D"],
        states: Sequence[MixerState | None],
        losses: list[tuple[int, Tensor]],
    ) -> tuple[Float[Tensor, "B T D"], list[MixerState]]:
        """Run the layers, and add their auxiliary losses to the list with their tokens' number."""
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            hidden_states, state, loss = layer(hidden_states, state)
            after.append(state)
            if loss is not None:
                losses.append((hidden_states.shape[0] * hidden_states.shape[1], loss))
        return self.norm(hidden_states), after


class OVQForCausalLM(OVQPreTrainedModel, OVQGenerationMixin):
    """The decoder with an output layer over the vocabulary.

    Example:
        >>> config = OVQConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
        >>> model = OVQForCausalLM(config).eval()
        >>> tuple(model(torch.arange(10)[None]).logits.shape)
        (1, 10, 64)
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    # The trainer then divides by the tokens of all accumulated batches.
    accepts_loss_kwargs = True

    def __init__(self, config: OVQConfig):
        super().__init__(config)
        self.model = OVQModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: OVQCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Int[Tensor, " P"] = 0,
        past_key_values: OVQCache | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits over the vocabulary, the loss if there are labels, and the state after.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: see :meth:`OVQModel.forward`.
            cache: see :meth:`OVQModel.forward`.
            inputs_embeds: ``[B, T, D]`` in place of ``input_ids``.
            labels: ``[B, T]``, the ids themselves (they are shifted here), -100 where ignored.
                With them, the loss in training includes the mixers' auxiliary loss.
            use_cache: see :meth:`OVQModel.forward`; ``None`` is no with labels, too.
            logits_to_keep: so many of the last positions, or a tensor of positions; 0 for all.
            past_key_values: the old name of ``cache``.
            num_items_in_batch: what the summed loss is divided by; ``None`` for its mean.

        Returns:
            ``loss`` (a scalar, or ``None``), ``logits`` ``[B, P, vocab_size]``, and the cache.

        Raises:
            ValueError: as :meth:`OVQModel.forward`.
        """
        if use_cache is None and labels is not None:
            use_cache = False  # so that padded batches are scored in one go
        outputs = self.model(
            input_ids, attention_mask, cache, inputs_embeds, use_cache, past_key_values,
            return_dict=True,
        )  # fmt: skip
        keep = logits_to_keep
        kept = slice(-keep, None) if isinstance(keep, int) and keep > 0 else keep
        hidden_states = outputs.last_hidden_state
        hidden_states = hidden_states if isinstance(kept, int) else hidden_states[:, kept]
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
            if outputs.auxiliary_loss is not None:
                loss = loss + _share(labels, num_items_in_batch) * outputs.auxiliary_loss
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, **_cache_field(getattr(outputs, CACHE_FIELD))
        )

    def state_size(self, num_tokens: int) -> int:
        """Bytes that the states of one row hold after ``num_tokens`` tokens, over all layers."""
        return self.model.state_size(num_tokens)

    def set_dictionary(self, **fields: int | float | str | None) -> None:
        """Run the same weights with another dictionary: see :meth:`OVQModel.set_dictionary`."""
        self.model.set_dictionary(**fields)


def _cache_field(cache: OVQCache | None) -> dict[str, Any]:
    return {CACHE_FIELD: cache}


def _mean_over_tokens(losses: list[tuple[int, Tensor]]) -> Tensor | None:
    if not losses:
        return None
    summed = sum((count * loss for count, loss in losses), start=torch.zeros_like(losses[0][1]))
    return summed / max(1, sum(count for count, _ in losses))


def _share(labels: Tensor, num_items_in_batch: int | Tensor | None) -> float | Tensor:
    """The share of this call's tokens in the batch that the loss is a mean over."""
    if num_items_in_batch is None:
        return 1.0
    return (labels[:, 1:] != -100).sum() / num_items_in_batch


def _is_right_padding(real: Bool[Tensor, "B T"]) -> bool:
    return bool((real[:, 1:] <= real[:, :-1]).all())


def _check_input_ids(input_ids: Tensor, vocab_size: int) -> None:
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ValueError(
            f"input_ids must be whole numbers [B, T], got {input_ids.dtype} "
            f"{tuple(input_ids.shape)}"
        )
    # On a GPU looking would wait for all work in flight; the embedding itself checks there.
    if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
        lowest, highest = input_ids.aminmax()
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"input_ids must lie in [0, {vocab_size}), got {int(lowest)} to {int(highest)}"
            )
