"""Starting values of the two parameters by which a head's decay is learned."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

INITIAL_DECAY_RATE = 16.0
MIN_STEP, MAX_STEP = 1e-3, 1e-1


def start_rates(A_log: Float[Tensor, " H"], lowest: float, highest: float) -> None:
    """Set ``A_log`` so that the rates ``exp(A_log)`` are uniform in ``(lowest, highest]``."""
    spread = (highest - lowest) * torch.rand(A_log.shape, device=A_log.device)
    _set_unless_loaded(A_log, (highest - spread).log())


def start_step_bias(dt_bias: Float[Tensor, " H"]) -> None:
    """Set ``dt_bias`` so that ``log softplus(dt_bias)`` is uniform between those of 0.001 and 0.1.

    Source: "Mamba" (arXiv 2312.00752), section 3.6, and its public code.
    """
    share = torch.rand(dt_bias.shape, device=dt_bias.device)
    step = MIN_STEP * (share * math.log(MAX_STEP / MIN_STEP)).exp()
    _set_unless_loaded(dt_bias, step.expm1().log())  # the inverse of softplus


def _set_unless_loaded(parameter: Float[Tensor, " H"], values: Float[Tensor, " H"]) -> None:
    # Loading a checkpoint guards the functions of torch.nn.init: a loaded parameter stays as it is.
    # None of them takes a tensor of values, so one of them marks what may be set.
    with torch.no_grad():
        nn.init.constant_(parameter, math.nan)
        parameter.copy_(torch.where(parameter.isnan(), values.to(parameter.dtype), parameter))
