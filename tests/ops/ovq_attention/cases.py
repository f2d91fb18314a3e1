"""Inputs for the tests of OVQ attention, drawn from generators, and how results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ovq import DictionaryConfig, OVQState
from ovq.ops.ovq_attention.api import ovq_attention_with_slots
from ovq.ops.ovq_attention.cpu import kernel

IMPLEMENTATIONS = ("reference", "torch")
VARIANTS = {
    "paper": {},
    "linear": {"growth": "linear", "growth_length": 24},
    "immediate": {"growth": "immediate"},
    "random": {"seeding": "random", "seed": 3},
    "novel": {"seeding": "novel"},
    "constant": {"rate": "constant", "step": 0.3},
    "constant-kept": {"rate": "constant", "step": 0.0},
    "unit": {"centroid": "unit"},
    "novel-unit": {"seeding": "novel", "centroid": "unit"},
    "constant-unit-linear": {
        "rate": "constant",
        "centroid": "unit",
        "growth": "linear",
        "growth_length": 20,
        "seeding": "novel",
    },
    "direction": {"centroid": "direction"},
    "window": {"window_chunks": 1},
    "window-novel": {"window_chunks": 2, "seeding": "novel"},
    "window-unit": {"window_chunks": 1, "centroid": "unit"},
    "window-random-direction": {
        "window_chunks": 2,
        "seeding": "random",
        "seed": 3,
        "centroid": "direction",
    },
    "window-constant-direction": {
        "window_chunks": 1,
        "rate": "constant",
        "step": 0.3,
        "centroid": "direction",
    },
}
needs_kernel = pytest.mark.skipif(
    not kernel.is_built(), reason="not built: python -m ovq.ops.ovq_attention.cpu.build"
)
by_implementation = pytest.mark.parametrize(
    "impl", ["torch", pytest.param("cpu", marks=needs_kernel)]
)  # fmt: skip
REAL_FIELDS = ("key_means", "value_means", "tail_keys", "tail_values")
WHOLE_FIELDS = ("counts", "num_active", "num_absorbed", "tail_length")


class Inputs(NamedTuple):
    """A call: q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]``, beta ``[H]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor

    def tokens(self, start: int, stop: int) -> "Inputs":
        """The call on some of the tokens."""
        return Inputs(*(x[:, start:stop] for x in self[:3]), self.beta)

    def row(self, index: int) -> "Inputs":
        """The call on one row."""
        return Inputs(*(x[index : index + 1] for x in self[:3]), self.beta)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The call in another dtype."""
        return Inputs(*(x.to(dtype) for x in self))

    def leaves(self) -> "Inputs":
        """The call on tensors that collect gradients."""
        return Inputs(*(x.detach().clone().requires_grad_() for x in self))


def generator(seed: int) -> torch.Generator:
    """A CPU generator."""
    return torch.Generator().manual_seed(seed)


def unit_vectors(*shape: int, seed: int) -> Tensor:
    """Random vectors of unit norm, float64."""
    x = torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


def zipf_vectors(*shape: int, seed: int, vocabulary: int = 12) -> Tensor:
    """The unit vectors of tokens whose frequency falls as 1 / rank: many duplicates."""
    table = unit_vectors(vocabulary, shape[-1], seed=seed + 1000)
    frequency = 1.0 / torch.arange(1, vocabulary + 1)
    count = max(1, torch.Size(shape[:-1]).numel())
    tokens = frequency.multinomial(count, replacement=True, generator=generator(seed))
    return table[tokens[: torch.Size(shape[:-1]).numel()]].reshape(shape)


def uneven_vectors(*shape: int, seed: int) -> Tensor:
    """Random vectors of norms between 1/4 and 4, mixed: few of the largest attract all others."""
    exponent = 4.0 * torch.rand(*shape[:-1], 1, generator=generator(seed + 2000)) - 2.0
    return 2.0 ** exponent.double() * unit_vectors(*shape, seed=seed)


def make_inputs(
    B: int = 2,
    T: int = 13,
    H: int = 4,
    G: int = 2,
    K: int = 5,
    V: int = 3,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    keys: Callable[..., Tensor] = unit_vectors,
) -> Inputs:
    """Unit-norm queries and keys, normal values and a beta between 1 and 5 per head."""
    return Inputs(
        q=unit_vectors(B, T, H, K, seed=seed),
        k=keys(B, T, G, K, seed=seed + 1),
        v=torch.randn(B, T, G, V, generator=generator(seed + 2), dtype=torch.float64),
        beta=1.0 + 4.0 * torch.rand(H, generator=generator(seed + 3), dtype=torch.float64),
    ).to(dtype)


def make_config(
    num_centroids: int = 6, chunk_size: int = 4, *, window_chunks: int = 0, **fields
) -> DictionaryConfig:
    """A dictionary small enough to fill and to merge; the window in chunks."""
    return DictionaryConfig(
        num_centroids=num_centroids,
        chunk_size=chunk_size,
        window_size=window_chunks * chunk_size,
        **fields,
    )


def run(inputs: Inputs, config: DictionaryConfig, impl: str, state=None, **options):
    """Output, state and slots of a call."""
    return ovq_attention_with_slots(*inputs, state, dictionary=config, impl=impl, **options)


def phased_state(config: DictionaryConfig, lengths: Sequence[int], *, seed: int = 50, **sizes):
    """A state in float64 whose rows have seen ``lengths`` tokens: filled, and at unlike phases."""
    inputs = make_inputs(1, sum(lengths), seed=seed, **sizes)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return run(inputs, config, "reference", cu_seqlens=ends)[1].detach()


def state_leaves(state: OVQState) -> tuple[OVQState, list[Tensor]]:
    """The state on leaves that collect gradients; places that hold nothing are cut off."""
    N, L = state.dictionary.num_centroids, state.dictionary.tail_size
    active = torch.arange(N) < state.num_active[:, None]
    waiting = torch.arange(L) < state.tail_length[:, None]
    leaves = {name: getattr(state, name).detach().clone().requires_grad_() for name in REAL_FIELDS}
    held = {
        name: leaf * (waiting[..., None, None] if "tail" in name else active[:, None, :, None])
        for name, leaf in leaves.items()
    }
    return replace(state, **held), list(leaves.values())


def real_tensors(o: Tensor, state: OVQState) -> list[Tensor]:
    """Everything differentiable that a call returns."""
    return [o, *(getattr(state, name) for name in REAL_FIELDS)]


def linear_functional(tensors: Sequence[Tensor], seed: int = 99) -> Tensor:
    """A random linear functional of the tensors, the same for the same shapes."""
    draw = generator(seed)
    weights = [torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in tensors]
    return sum((w.to(t.dtype) * t).sum().double() for w, t in zip(weights, tensors, strict=True))


def gradients(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the linear functional; zero for a leaf that nothing depends on."""
    loss = linear_functional(tensors)
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / max(|expected|, 0.1)``: numbers here are of order one."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(0.1))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "output") -> None:
    """Same shape, and a relative error within the tolerance; NaN is never near."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{what}: relative error {error:.3g} above {tolerance:.3g}"


def assert_all_near(actual, expected, tolerance: float, what: str) -> None:
    """Each tensor near its counterpart."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_near(a, b, tolerance, f"{what} {index}")


def assert_states_near(actual: OVQState, expected: OVQState, tolerance: float) -> None:
    """Whole numbers equal, real ones near, one configuration."""
    assert actual.dictionary == expected.dictionary
    for name in WHOLE_FIELDS:
        found, wanted = getattr(actual, name), getattr(expected, name)
        assert found.dtype == torch.int64, f"{name} is {found.dtype}"
        assert torch.equal(found, wanted), f"{name}: {found.tolist()} is not {wanted.tolist()}"
    for name in REAL_FIELDS:
        assert_near(getattr(actual, name), getattr(expected, name), tolerance, name)


def state_bits(state: OVQState) -> dict[str, Tensor]:
    """A copy of every tensor of the state."""
    return {n: getattr(state, n).detach().clone() for n in REAL_FIELDS + WHOLE_FIELDS}


def assert_bits_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same tensors, bit for bit."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), f"{name} changed"
