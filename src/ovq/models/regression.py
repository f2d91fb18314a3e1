"""The same decoder on vectors of numbers: a linear layer before it, and one after it."""

from dataclasses import dataclass
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ovq.models.cache import CACHE_FIELD, OVQCache
from ovq.models.configuration_ovq import OVQConfig, _check_positive
from ovq.models.modeling_ovq import OVQModel, OVQPreTrainedModel


# transformers makes this a dataclass that takes any further keyword, which shape checking refuses.
@no_type_check
class OVQRegressionConfig(OVQConfig):
    """Shape of a model of numbers: that of a language model, with other ends.

    Attributes:
        num_inputs: numbers given at each place.
        num_outputs: numbers asked for at a place.
        vocab_size: not read, as there are no tokens.

    Raises:
        ValueError: a field out of its range, see :class:`~ovq.models.OVQConfig`.
    """

    model_type = "ovq_regression"

    vocab_size: int = 1
    num_inputs: int = 1
    num_outputs: int = 1

    def validate(self) -> None:
        """Check all fields, as transformers also does before it saves.

        Raises:
            ValueError: a field out of its range.
        """
        super().validate()
        _check_positive(self, "num_inputs", "num_outputs")


# transformers annotates the cache with a class of its own, which shape checking insists on.
@no_type_check
@dataclass
class OVQRegressionOutput(CausalLMOutputWithPast):
    """What the model returns.

    Attributes:
        loss: mean squared error, a scalar, or ``None`` without targets.
        logits: the predictions ``[B, T, num_outputs]``, under the name that transformers expects.
    """

    @property
    def predictions(self) -> Tensor:
        """The predictions ``[B, T, num_outputs]``."""
        assert self.logits is not None
        return self.logits


class OVQForRegression(OVQPreTrainedModel):
    """The decoder between a read-in and a read-out layer.

    Example:
        >>> config = OVQRegressionConfig(num_inputs=5, hidden_size=32, num_hidden_layers=2)
        >>> model = OVQForRegression(config).eval()
        >>> tuple(model(torch.randn(1, 10, 5)).predictions.shape)
        (1, 10, 1)
    """

    config: OVQRegressionConfig
    config_class = OVQRegressionConfig
    main_input_name = "inputs"
    _input_embed_layer = "read_in"
    # Each sequence has as many targets as any other: the mean over batches is that over targets.
    accepts_loss_kwargs = False

    def __init__(self, config: OVQRegressionConfig):
        super().__init__(config)
        self.read_in = nn.Linear(config.num_inputs, config.hidden_size)
        self.model = OVQModel(config)
        del self.model.embed_tokens  # no parameter without a gradient
        self.read_out = nn.Linear(config.hidden_size, config.num_outputs)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        cache: OVQCache | None = None,
        targets: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: OVQCache | None = None,
    ) -> OVQRegressionOutput:
        """A prediction at every place, the loss if there are targets, and the state after.

        Args:
            inputs: ``[B, T, num_inputs]``.
            attention_mask: see :meth:`ovq.models.OVQModel.forward`.
            cache: see :meth:`ovq.models.OVQModel.forward`.
            targets: ``[B, T, num_outputs]``, what is to be predicted at that very place (nothing is
                shifted), NaN where nothing is asked. With them, the loss in training includes the
                mixers' auxiliary loss.
            use_cache: see :meth:`ovq.models.OVQModel.forward`; ``None`` is no with targets, too.
            past_key_values: the old name of ``cache``.

        Returns:
            ``loss`` (a scalar, or ``None``), ``predictions`` ``[B, T, num_outputs]``, the cache.

        Raises:
            ValueError: inputs or targets of another shape, or as
                :meth:`ovq.models.OVQModel.forward`.
        """
        _check_numbers("inputs", inputs, (*inputs.shape[:2], self.config.num_inputs))
        if targets is not None:
            _check_numbers("targets", targets, (*inputs.shape[:2], self.config.num_outputs))
        if use_cache is None and targets is not None:
            use_cache = False
        hidden_states = self.read_in(inputs.to(self.read_in.weight.dtype))
        outputs = self.model(
            None, attention_mask, cache, hidden_states, use_cache, past_key_values,
            return_dict=True,
        )  # fmt: skip
        predictions = self.read_out(outputs.last_hidden_state)
        loss = None
        if targets is not None:
            loss = squared_error(predictions, targets)
            if outputs.auxiliary_loss is not None:
                loss = loss + outputs.auxiliary_loss
        after = {CACHE_FIELD: getattr(outputs, CACHE_FIELD)}
        return OVQRegressionOutput(loss=loss, logits=predictions, **after)

    def state_size(self, num_tokens: int) -> int:
        """Bytes that the states of one row hold after ``num_tokens`` places, over all layers."""
        return self.model.state_size(num_tokens)

    def set_dictionary(self, **fields: int | float | str | None) -> None:
        """Run the same weights with another dictionary: see :meth:`OVQModel.set_dictionary`."""
        self.model.set_dictionary(**fields)


def squared_error(
    predictions: Float[Tensor, "B T P"], targets: Float[Tensor, "B T P"]
) -> Float[Tensor, ""]:
    """The mean squared error over the targets that are numbers, in float32 at least.

    >>> nan = float("nan")
    >>> squared_error(torch.tensor([[[3.0], [7.0]]]), torch.tensor([[[1.0], [nan]]]))
    tensor(4.)
    """
    asked = ~targets.isnan()
    wide = torch.promote_types(predictions.dtype, torch.float32)
    # Zeros in place of NaN first, whose gradient would spoil the others'.
    errors = (predictions.to(wide) - targets.nan_to_num()) * asked
    return errors.square().sum() / asked.sum().clamp(min=1)


def _check_numbers(name: str, numbers: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(numbers.shape) != shape or len(shape) != 3 or not numbers.is_floating_point():
        wanted = ", ".join(["B", "T", *map(str, shape[-1:])])
        raise ValueError(
            f"{name} must be numbers [{wanted}], got {numbers.dtype} {tuple(numbers.shape)}"
        )
