"""Newton's method, with gradient and Hessian by autograd on the loss itself."""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


def gradient_and_hessian(
    loss: Loss, at: Float64[Tensor, "N K"]
) -> tuple[Float64[Tensor, " NK"], Float64[Tensor, "NK NK"]]:
    """The gradient and the whole Hessian of ``loss``, by autograd, over the flattened means.

    Args:
        loss: a twice differentiable function from means ``[N, K]`` to a number.
        at: the means ``[N, K]``.

    Returns:
        ``[N K]`` and ``[N K, N K]``.

    Example:
        >>> at = torch.tensor([[3.0]]).double()
        >>> [x.tolist() for x in gradient_and_hessian(lambda means: (means**2).sum(), at)]
        [[6.0], [[2.0]]]
    """
    gradient = torch.func.grad(loss)(at).flatten()
    # Twice in reverse: forward mode, which torch.func.hessian takes, warns of torch's own scripts.
    hessian = torch.func.jacrev(torch.func.grad(loss))(at)
    return gradient, hessian.reshape(len(gradient), len(gradient))


def newton_step(loss: Loss, at: Float64[Tensor, "N K"]) -> Float64[Tensor, "N K"]:
    """``means - H^-1 g`` with gradient and Hessian of ``loss`` by autograd.

    Args:
        loss: a twice differentiable function from means ``[N, K]`` to a number; its Hessian at
            the means is not singular.
        at: the means ``[N, K]``.

    Returns:
        The new means ``[N, K]``.

    Example:
        >>> zero = torch.zeros(1, 1).double()
        >>> newton_step(lambda means: (means - 5).square().sum(), zero).tolist()
        [[5.0]]
    """
    gradient, hessian = gradient_and_hessian(loss, at)
    return at - torch.linalg.solve(hessian, gradient).view_as(at)
