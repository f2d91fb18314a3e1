"""Floating-point operations of a training step, counted at short lengths and exact at any.

Counted are matrix products and triangular and full solves, forward and backward, two operations for
each multiply-add, as they are computed: a causal triangle once, what gradient checkpointing repeats
twice, blocks with masked places in full. What acts on each number by itself is left out.

``torch.utils.flop_counter`` knows neither solves nor operators of this package: :func:`formulas`
has theirs. What OVQ attention computes depends on its dictionary: :func:`ovq_operator_flops`.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ovq.models import OVQConfig, OVQForCausalLM
from ovq.models.configuration_ovq import dictionary_config
from ovq.ops.ovq_attention import DictionaryConfig
from ovq.ops.sink_attention import BLOCK
from ovq.ops.vq_attention import SHORT

Shape = tuple[int, ...]
# A multiple of the chunks of all recurrent operators.
CHUNK = 64


def num_pairs(num_queries: int, num_keys: int, is_causal: bool) -> int:
    """Products of a query with a key in one head.

    Example:
        >>> num_pairs(4, 4, True), num_pairs(4, 4, False)
        (10, 16)
    """
    return num_queries * (num_queries + 1) // 2 if is_causal else num_queries * num_keys


def _attention(
    q: Shape, k: Shape, v: Shape, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> int:
    pairs = q[0] * q[1] * num_pairs(q[2], k[2], is_causal)
    return 2 * pairs * (k[3] + v[3])


def _attention_backward(
    grad: Shape, q: Shape, k: Shape, v: Shape, o: Shape, lse: Shape, dropout_p: float,
    is_causal: bool, **_: Any,
) -> int:  # fmt: skip
    # The logits once more, and gradients of weights, values, queries and keys.
    pairs = q[0] * q[1] * num_pairs(q[2], k[2], is_causal)
    return 2 * pairs * (3 * k[3] + 2 * v[3])


def _solve_triangular(system: Shape, sides: Shape, **_: Any) -> int:
    return math.prod(sides[:-2]) * sides[-2] ** 2 * sides[-1]


def _solve(system: Shape, sides: Shape, **_: Any) -> int:
    size, num_systems = system[-1], math.prod(system[:-2])
    return num_systems * 2 * size**3 // 3 + 2 * size * math.prod(sides)


def _solve_again(factors: Shape, pivots: Shape, sides: Shape, **_: Any) -> int:
    return 2 * factors[-1] * math.prod(sides)


def _scan_of_chunks(*shapes: Any, **_: Any) -> int:  # one of them says which way
    h, written = shapes[2], shapes[4]
    # What the memory recalls, and what is written into it.
    return 0 if written is None or h is None else 2 * 2 * math.prod(written) * h[-2]


def formulas() -> dict[Any, Callable[..., int]]:
    """What the counter lacks, by operator: attention on CPUs, solves, and chunks in a row."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.linalg_solve_triangular: _solve_triangular,
        aten._linalg_solve_ex: _solve,
        aten.linalg_lu_solve: _solve_again,
        torch.ops.ovq.chunk_scan: _scan_of_chunks,
    }


def ovq_operator_flops(
    dictionary: DictionaryConfig,
    num_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> int:
    """Those of one forward and backward of OVQ attention, by formula.

    Of a chunk with ``n`` active slots, each query reads the slots, the exact window and half the
    chunk: ``2 (K + V)`` operations a pair forward, ``2 (3 K + 2 V)`` backward. Each key of a full
    chunk is compared with the slots there are after it: ``2 K``.

    Args:
        dictionary: its slots, chunks and growth.
        num_tokens: ``T``.
        num_heads: query heads ``H``.
        num_kv_heads: key-value heads ``G``.
        head_dim: ``K = V``.

    Example:
        >>> dictionary = DictionaryConfig(num_centroids=8, chunk_size=2, growth="immediate")
        >>> ovq_operator_flops(dictionary, 4, num_heads=1, num_kv_heads=1, head_dim=1)
        164
    """
    C, W = dictionary.chunk_size, dictionary.window_size
    pairs, compared, active = 0, 0, 0
    for start in range(0, num_tokens, C):
        width = min(C, num_tokens - start)
        pairs += width * (active + min(start, W)) + num_pairs(width, width, True)
        absorbed = start + width - W
        if width == C and absorbed > 0:
            active = dictionary.num_active_after(active, absorbed)
            compared += C * active
    return head_dim * (2 * 7 * num_heads * pairs + 2 * num_kv_heads * compared)


def training_flops(config: OVQConfig, lengths: Iterable[int]) -> dict[int, int]:
    """Floating-point operations of one forward and backward over one sequence of each length.

    All but the operator of OVQ attention are counted at a short length, and for a long one are a
    polynomial of degree two in the number of whole blocks: three short steps with as many tokens
    left over give it.

    Args:
        config: of the model; its OVQ layers, if any, keep exact means (``rate="mean"``).
        lengths: tokens ``T``.

    Returns:
        By length.

    Example:
        >>> config = OVQConfig(vocab_size=16, hidden_size=8, intermediate_size=8, window_size=8,
        ...                    num_attention_heads=1, num_hidden_layers=1, block_size=8,
        ...                    layer_pattern=["sliding_window"])
        >>> flops = training_flops(config, [640, 1280, 1920])  # linear beyond the first window
        >>> flops[1920] - flops[1280] == flops[1280] - flops[640] > 6 * 640 * (4 * 64 + 3 * 64)
        True
    """
    model, unit = OVQForCausalLM(config).train(), _tokens_of_a_period(config)
    # Up to there VQ goes another way.
    above = SHORT if any(name.startswith("vq") for name in config.mixer_names) else 0
    dictionary = dictionary_config(config.dictionary)
    sizes = {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
    count = cache(partial(counted_flops, model))
    found = {}
    for length in lengths:
        of_operator = ovq_operator_flops(dictionary, length, **sizes)
        num_operators = config.mixer_names.count("ovq")
        # What windowed OVQ computes grows with its dictionary, no polynomial.
        exact = "windowed_ovq" in config.mixer_names
        counted = count(length) if exact else _extrapolated(count, length, unit, above)
        found[length] = counted + num_operators * of_operator
    return found


def _tokens_of_a_period(config: OVQConfig) -> int:
    """After so many tokens the blocks of all layers start anew together."""
    names = config.mixer_names
    window = config.window_size if "sliding_window" in names else 1
    block = config.block_size if any(name.startswith("vq") for name in names) else 1
    read = BLOCK if "sliding_window_sinks" in names else 1
    return math.lcm(CHUNK, window, block, read)


def _extrapolated(count: Callable[[int], int], length: int, unit: int, above: int) -> int:
    """What is counted, from a few short lengths, longer than ``above``, if this one is long."""
    # The first block, and the first pair of chunks, cost other than the rest.
    start = max(2, 1 + above // unit)
    if length < (start + 3) * unit:
        return count(length)
    left_over = length % unit
    first, second, third = (count(left_over + (start + times) * unit) for times in range(3))
    slope, bend, x = second - first, third - 2 * second + first, length // unit - start
    return first + x * slope + x * (x - 1) // 2 * bend


def counted_flops(model: OVQForCausalLM, num_tokens: int) -> int:
    """What the counter finds in one forward and backward: all but the operator of OVQ attention."""
    ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    with counter:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops()
