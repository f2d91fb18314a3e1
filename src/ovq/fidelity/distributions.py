"""Queries, keys and values that are drawn; those of a pretrained model are in ``pretrained.py``."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

VOCABULARY = 4096
NOISE = 0.5
# The temperature at which a layer of ours starts.
BETA = 8.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence of a distribution.

    Attributes:
        distribution: its name.
        part: which seed or layer it is.
        q: ``[T, H, K]``.
        k: ``[T, G, K]``.
        v: ``[T, G, V]``.
        beta: inverse temperature of the softmax.
    """

    distribution: str
    part: int
    q: Float[Tensor, "T H K"]
    k: Float[Tensor, "T G K"]
    v: Float[Tensor, "T G V"]
    beta: float


def random_keys(length: int, seed: int, num_heads: int = 4, head_dim: int = 64) -> Sample:
    """Independent queries and keys, uniform on the unit sphere; normal values.

    Nothing repeats, so no dictionary smaller than the sequence can know it: the worst case.

    Args:
        length: tokens ``T``.
        seed: of the draw.
        num_heads: ``H = G``.
        head_dim: ``K = V``.

    Example:
        >>> random_keys(100, seed=0).k.shape
        torch.Size([100, 4, 64])
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (length, num_heads, head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return Sample(
        distribution="random", part=seed, q=normalize(q, dim=-1), k=normalize(k, dim=-1), v=v,
        beta=BETA,
    )  # fmt: skip


def zipf_keys(length: int, seed: int, num_heads: int = 4, head_dim: int = 64) -> Sample:
    """Keys of tokens whose frequency falls as 1 / rank, with noise, as words do in a text.

    Each of 4,096 tokens has a random unit key and a normal value. A key is its token's plus noise
    of norm 0.5, scaled to unit norm; a query is drawn as a key is, of a token drawn anew; a value
    is its token's plus normal noise of deviation 0.5.

    Args:
        length: tokens ``T``.
        seed: of the draw.
        num_heads: ``H = G``; each has tokens of its own.
        head_dim: ``K = V``.

    Example:
        >>> zipf_keys(100, seed=0).q.norm(dim=-1).allclose(torch.ones(100, 4))
        True
    """
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    table = torch.randn(2, VOCABULARY, num_heads, head_dim, generator=generator)
    token_keys, token_values = normalize(table[0], dim=-1), table[1]

    def draw() -> Tensor:
        return frequency.multinomial(length, replacement=True, generator=generator)

    def near(vectors: Tensor) -> Tensor:
        noise = normalize(torch.randn(vectors.shape, generator=generator), dim=-1)
        return normalize(vectors + NOISE * noise, dim=-1)

    tokens, asked = draw(), draw()
    q, k = near(token_keys[asked]), near(token_keys[tokens])
    v = token_values[tokens] + NOISE * torch.randn(k.shape, generator=generator)
    return Sample(distribution="zipf", part=seed, q=q, k=k, v=v, beta=BETA)


DISTRIBUTIONS: dict[str, Callable[[int, int], Sample]] = {"random": random_keys, "zipf": zipf_keys}
