"""The configuration of a causal language model over any pattern of sequence mixers."""

import math
import os
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import MISSING, asdict, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, ClassVar, no_type_check

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from ovq.layers.base import check_above_zero
from ovq.layers.registry import check_mixer_name, check_short_conv, check_ssmax
from ovq.models.shipped_code import CONFIG_CLASS, ship_code
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.ops.vq_attention import check_straight_through

logger = logging.get_logger(__name__)

# Of transformers, in files of its models, though no attributes of its configurations.
FOREIGN_FIELDS = frozenset(
    {
        "attn_implementation", "auto_map", "experts_implementation", "model_type",
        "per_layer_config", "quantization_config", "torch_dtype",
    }
)  # fmt: skip


# transformers makes this a dataclass that takes any further keyword, which shape checking refuses.
@no_type_check
class OVQConfig(PreTrainedConfig):
    """Shape of the model, in Hugging Face's words where it has them.

    A saved model holds no code, and a process that loads it imports ``ovq.models`` first. After

        OVQConfig.register_for_auto_class()
        OVQForCausalLM.register_for_auto_class("AutoModelForCausalLM")

    ``save_pretrained`` adds files that do this import, no more: the folder then loads by
    ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` wherever the package
    ovq is installed, in whichever version.

    Attributes:
        vocab_size: tokens in the vocabulary.
        hidden_size: ``D``.
        intermediate_size: width of the SwiGLU block.
        num_hidden_layers: layers.
        num_identity_layers: the first so many start as the identity, output projections zero.
            A deep and narrow model then first learns what a shallow one does.
        num_attention_heads: query heads ``H``.
        num_key_value_heads: key-value heads ``G``, which divides ``H``; ``None`` for ``H``. Gated
            DeltaNet, Mamba-2 and MesaNet layers have no grouped heads, and do not read it.
        head_dim: ``K = V``; ``None`` for ``hidden_size / H``.
        max_position_embeddings: the longest sequence it is meant for. Nothing in the model is
            bound by it, but evaluation tools truncate to it.
        layer_pattern: mixer names, repeated over the layers.
        layer_fields: fields that differ by layer, one mapping a layer, repeated over the layers,
            such as ``[{"window_size": 64}, {"dictionary": {"num_centroids": 512}}]``; of
            :data:`LAYER_FIELDS`. Empty for none.
        window_size: ``W`` of sliding-window layers: a token sees itself and ``W - 1`` before it.
        dictionary: the fields of :class:`~ovq.ops.ovq_attention.DictionaryConfig`, for OVQ layers;
            those left out have its defaults.
        initial_beta: inverse temperature that every head of OVQ and VQ layers starts from. It is
            learned, but slowly: the larger it is in the end, the less a query is lost among many.
        ssmax_length: with it full attention, OVQ and VQ layers have scalable softmax: queries with
            ``n`` tokens before and at them grow by ``log n / log ssmax_length``, so that what is
            learned in short contexts is as sharp in long ones; ``None`` for plain softmax.
        initial_decay_rate: the largest that a head of Gated DeltaNet or Mamba-2 starts from. Rates
            are drawn, so that some of many heads start with a long memory; where a layer has one
            head or two, a smaller one gives it to them.
        num_first_tokens: ``S``, tokens at the start of a sequence that windowed OVQ layers and
            sliding windows with sinks keep for good.
        dictionary_distance: tokens between a query and the dictionary of windowed OVQ layers, for
            its rotary embedding.
        max_rotary_position: the last position from which those layers read the first tokens.
        num_codes: codes ``S`` of each codebook of VQ layers; 512 as in Transformer-VQ, half the
            default dictionary of OVQ layers.
        block_size: ``C`` of VQ layers: a token sees the keys of its own block and the one before
            one by one.
        straight_through: which gradients pass the quantization of VQ layers' keys, ``"keys"`` as in
            Transformer-VQ or ``"scores"``, with which queries and older keys learn more.
        use_short_conv: whether OVQ, VQ and linear attention layers have a short causal convolution.
            Gated DeltaNet, Mamba-2 and MesaNet layers always have it; full attention and sliding
            windows never do, and a pattern of them alone is refused.
        expand_v: ``V / K`` of Gated DeltaNet layers, a multiple of ``1 / head_dim``.
        ssm_state_size: numbers that each channel of Mamba-2 layers remembers.
        ssm_expand: channels of Mamba-2 layers, as a multiple of ``hidden_size``; with heads of
            ``head_dim`` channels, whatever ``num_attention_heads``.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square in the norms.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: whether the output layer shares the embedding's weights.
        use_cache: whether to return the state, outside training, when a call does not say.

    Raises:
        ValueError: a field out of its range, or an unknown mixer or field of ``dictionary``. Other
            unknown fields are kept, as transformers does, with a warning.

    Example:
        >>> config = OVQConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3)
        >>> config.mixer_names
        ['sliding_window', 'ovq', 'sliding_window']
    """

    model_type = "ovq"
    # The state's name up to and from transformers 5.24.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 8
    num_identity_layers: int = 0
    num_attention_heads: int = 8
    # None until filled in from the others.
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    max_position_embeddings: int = 131072
    layer_pattern: list[str] = field(default_factory=lambda: ["sliding_window", "ovq"])
    layer_fields: list[dict] = field(default_factory=list)
    window_size: int = 128
    dictionary: dict = field(default_factory=lambda: {"num_centroids": 1024, "chunk_size": 128})
    initial_beta: float = 8.0
    ssmax_length: int | None = None
    initial_decay_rate: float = 16.0
    num_first_tokens: int = 4
    dictionary_distance: int = 2048
    max_rotary_position: int = 8191
    num_codes: int = 512
    block_size: int = 128
    straight_through: str = "keys"
    use_short_conv: bool = False
    expand_v: float = 1.0
    ssm_state_size: int = 128
    ssm_expand: float = 2.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        _check_positive(self, "hidden_size", "num_attention_heads")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads must divide hidden_size {self.hidden_size} unless "
                    f"head_dim is given, got {self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.validate()
        # In full, so that a saved model does not depend on later defaults.
        self.dictionary = asdict(dictionary_config(self.dictionary))
        super().__post_init__(**kwargs)
        unknown = _unknown(kwargs)
        if unknown:
            logger.warning(
                f"OVQConfig has no fields {unknown}, which have no effect: misspelt, or of a model "
                f"that a newer ovq saved?"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, with the fields given checked as those of the file are.

        Args:
            config_dict: of the file.
            **kwargs: fields to change, in all layers, and options. ``dictionary`` may hold those of
                its fields alone that change.

        Raises:
            ValueError: as the constructor.
        """
        own = {name: kwargs.pop(name) for name in OWN_FIELDS & kwargs.keys()}
        saved, changed = config_dict.get("dictionary"), own.get("dictionary")
        if isinstance(saved, Mapping) and isinstance(changed, Mapping):
            own["dictionary"] = {**saved, **changed}
        by_layer = config_dict.get("layer_fields")
        if isinstance(by_layer, list) and "layer_fields" not in own:
            own["layer_fields"] = [_changed_layer(fields, own, changed) for fields in by_layer]
        return super().from_dict({**config_dict, **own}, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs
    ) -> None:
        """As in transformers, with the installed classes named in place of copied source files.

        Args:
            save_directory: folder to write ``config.json`` into.
            push_to_hub: whether to upload it.
            **kwargs: of transformers, for the upload.

        Raises:
            ValueError: a field that was set out of its range.
        """
        auto_map = getattr(self, "auto_map", None)
        if auto_map:  # of a registered model: without its configuration it could not be loaded
            auto_map.setdefault("AutoConfig", CONFIG_CLASS)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        ship_code(Path(save_directory), getattr(self, "auto_map", None) or {})

    @property
    def mixer_names(self) -> list[str]:
        """The mixer of each layer: the pattern repeated over the layers."""
        names = self.layer_pattern
        return [names[index % len(names)] for index in range(self.num_hidden_layers)]

    def for_layer(self, layer_idx: int) -> "OVQConfig":
        """This configuration with the fields of one layer in their places."""
        changes = self.layer_fields[layer_idx % len(self.layer_fields)] if self.layer_fields else {}
        if not changes:
            return self
        own = copy(self)
        for name, value in changes.items():
            within = name == "dictionary"
            setattr(own, name, {**self.dictionary, **value} if within else value)
        return own

    def validate(self) -> None:
        """Check all fields, as transformers also does before it saves.

        Raises:
            ValueError: a field out of its range.
        """
        _check_layer_fields(self.layer_fields)
        for layer_idx in range(max(1, len(self.layer_fields))):
            _check_sizes(self.for_layer(layer_idx))
        check_straight_through(self.straight_through)
        _check_positive(
            self, "vocab_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads",
            "head_dim", "max_position_embeddings",
        )  # fmt: skip
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        number = self.num_identity_layers
        if type(number) is not int or not 0 <= number <= self.num_hidden_layers:
            raise ValueError(
                f"num_identity_layers must be an integer from 0 to num_hidden_layers "
                f"{self.num_hidden_layers}, got {number!r}"
            )
        _check_pattern(self.layer_pattern)
        self.layer_pattern = list(self.layer_pattern)
        for name in ("use_short_conv", "tie_word_embeddings", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        check_short_conv(self.use_short_conv, self.layer_pattern)
        check_ssmax(self.ssmax_length, self.layer_pattern)
        for name in (
            "rope_theta", "rms_norm_eps", "initializer_range", "expand_v", "ssm_expand",
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_finite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        check_above_zero(initial_beta=self.initial_beta, initial_decay_rate=self.initial_decay_rate)
        if self.rope_theta == 0:  # its inverse frequencies are powers of 1 / rope_theta
            raise ValueError(f"rope_theta must be above 0, got {self.rope_theta!r}")


# Those that layers may have each their own of: sizes of what a mixer remembers.
LAYER_FIELDS = (
    "dictionary", "window_size", "num_first_tokens", "dictionary_distance", "num_codes",
    "block_size", "ssm_state_size",
)  # fmt: skip
OWN_FIELDS = frozenset(OVQConfig.__annotations__) - {"keys_to_ignore_at_inference"}


def _changed_layer(fields: Any, own: Mapping[str, Any], dictionary: Any) -> Any:
    """The fields of one layer, with those that a caller changes in all layers."""
    if not isinstance(fields, Mapping):
        return fields  # refused with the others
    changed = {name: own.get(name, value) for name, value in fields.items()}
    if isinstance(fields.get("dictionary"), Mapping) and isinstance(dictionary, Mapping):
        changed["dictionary"] = {**fields["dictionary"], **dictionary}
    return changed


def dictionary_config(fields: Any) -> DictionaryConfig:
    """The dictionary's configuration from a mapping of its fields by name.

    Raises:
        ValueError: no mapping, an unknown or missing field, or one out of its range.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"dictionary must hold fields by name, got {fields!r}")
    known = {field.name: field.default for field in fields_of(DictionaryConfig)}
    unknown = sorted(map(repr, fields.keys() - known.keys()))
    if unknown:
        raise ValueError(
            f"dictionary must hold no fields but {sorted(known)}, got {', '.join(unknown)}: "
            f"misspelt, or of a model that a newer ovq saved?"
        )
    missing = [name for name, start in known.items() if start is MISSING and name not in fields]
    if missing:
        raise ValueError(f"dictionary must hold {', '.join(missing)}, got {dict(fields)!r}")
    return DictionaryConfig(**fields)


def _unknown(names: Iterable[str]) -> list[str]:
    """Those that neither this configuration nor transformers has fields of."""
    known = FOREIGN_FIELDS | GenerationConfig().to_dict().keys() | set(dir(PreTrainedConfig))
    return sorted(name for name in set(names) - known if not name.startswith("_"))


def _check_pattern(names: object) -> None:
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise ValueError(f"layer_pattern must be a list of at least one mixer, got {names!r}")
    for name in names:
        check_mixer_name(name, "layer_pattern")


def _check_layer_fields(fields: Any) -> None:
    if not isinstance(fields, list | tuple) or not all(isinstance(f, Mapping) for f in fields):
        raise ValueError(f"layer_fields must be a list of fields by name, got {fields!r}")
    unknown = sorted({str(name) for f in fields for name in f} - set(LAYER_FIELDS))
    if unknown:
        raise ValueError(f"layer_fields must hold fields among {LAYER_FIELDS}, got {unknown[0]!r}")
    for f in fields:
        if not isinstance(f.get("dictionary", {}), Mapping):
            raise ValueError(f"dictionary must hold fields by name, got {f['dictionary']!r}")


def _check_sizes(config: OVQConfig) -> None:
    """Raise unless what the mixers of a layer remember has sizes in their ranges."""
    dictionary_config(config.dictionary)
    _check_positive(config, "window_size", "num_codes", "block_size", "ssm_state_size")
    for name in ("num_first_tokens", "dictionary_distance", "max_rotary_position"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and math.isfinite(value)


def _check_positive(config: OVQConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
