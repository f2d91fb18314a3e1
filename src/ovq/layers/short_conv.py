"""A short causal convolution, one filter a channel, whose state is its last inputs."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    """Depthwise causal convolution followed by SiLU: ``y_t = silu(sum_j w_j x_(t - P + j) + b)``.

    Args:
        num_channels: channels ``F``, each with a filter of its own.
        width: taps, at least 1; the state holds the last ``P = width - 1`` inputs.
        bias: whether there is a bias ``b``, one number a channel.

    Raises:
        ValueError: ``width`` below 1.

    Example:
        >>> convolution = ShortConvolution(8)
        >>> y, past = convolution(torch.randn(1, 5, 8), convolution.init_state(1))
        >>> tuple(y.shape), tuple(past.shape)
        ((1, 5, 8), (1, 3, 8))
    """

    def __init__(self, num_channels: int, width: int = 4, *, bias: bool = False):
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.weight = nn.Parameter(torch.empty(width, num_channels))
        self.bias = nn.Parameter(torch.empty(num_channels)) if bias else None
        self.init_parameters()

    def init_parameters(self) -> None:
        """Uniform within ``width^-1/2``, as PyTorch's own convolutions start."""
        bound = math.sqrt(1 / self.weight.shape[0])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def init_state(self, batch_size: int) -> Float[Tensor, "B P F"]:
        """The inputs before the first token: zeros."""
        width, num_channels = self.weight.shape
        return self.weight.new_zeros(batch_size, width - 1, num_channels)

    def forward(
        self, x: Float[Tensor, "B T F"], past: Float[Tensor, "B P F"]
    ) -> tuple[Float[Tensor, "B T F"], Float[Tensor, "B P F"]]:
        """Convolve.

        Args:
            x: inputs ``[B, T, F]``.
            past: the ``P`` inputs before them, ``[B, P, F]``.

        Returns:
            ``[B, T, F]`` in the dtype of ``x``, and the last ``P`` inputs ``[B, P, F]``.
        """
        T, taps = x.shape[1], self.weight.to(x.dtype)
        inputs = torch.cat([past.to(x.dtype), x], dim=1)
        start = x.new_zeros(()) if self.bias is None else self.bias.to(x.dtype)
        y = sum((taps[j] * inputs[:, j : j + T] for j in range(len(taps))), start=start)
        # A copy: a view would keep the inputs of every token alive.
        return F.silu(y), inputs[:, T:].clone()
