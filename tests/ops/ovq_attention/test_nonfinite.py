"""NaN and infinite inputs show in every output that depends on them: none is hidden by a kernel."""

import pytest
import torch
from torch import Tensor

from .cases import VARIANTS, Inputs, make_config, make_inputs, needs_kernel, run

C = 5
VALUES = [float("nan"), float("inf"), -float("inf")]
PLACES = [("q", 7), ("k", 0), ("k", 8), ("v", 2)]


def spoiled(inputs: Inputs, name: str, place: int, value: float) -> Inputs:
    """The call with one number of ``q``, ``k`` or ``v`` replaced, in row 0, at token ``place``."""
    tensor = getattr(inputs, name).clone()
    tensor[0, place, 1, 1] = value
    return inputs._replace(**{name: tensor})


def kinds(o: Tensor) -> Tensor:
    """0 where a number is finite, 1 where it is infinite, 2 where it is NaN."""
    return o.isinf() + 2 * o.isnan()


def decoded(inputs: Inputs, config) -> Tensor:
    """The kernel's outputs token by token."""
    outputs, state = [], None
    for token in range(inputs.q.shape[1]):
        o, state, _ = run(inputs.tokens(token, token + 1), config, "cpu", state)
        outputs.append(o)
    return torch.cat(outputs, dim=1)


def assert_same_kinds(o: Tensor, expected: Tensor, name: str, place: int) -> None:
    """From the spoiled token on.

    Before it, ``reference`` multiplies a value that a query does not see by its weight of 0, which
    is NaN; a kernel need not.
    """
    assert kinds(expected).any()
    start = place if name == "v" else 0
    assert torch.equal(kinds(o)[:, start:], kinds(expected)[:, start:])
    assert o[1:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("name", "place"), PLACES)
@pytest.mark.parametrize("variant", ["paper", "novel-unit"])
def test_the_kernel_shows_what_reference_shows(variant, name, place, value):
    config = make_config(6, C, **VARIANTS[variant])
    inputs = spoiled(make_inputs(2, 14, dtype=torch.float32), name, place, value)
    expected = run(inputs, config, "reference")[0]
    assert_same_kinds(run(inputs, config, "cpu")[0], expected, name, place)
    assert_same_kinds(decoded(inputs, config), expected, name, place)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [3, 215])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_in_dictionaries_and_chunks_of_several_blocks(name, place, dtype):
    config = make_config(150, 110)
    inputs = spoiled(make_inputs(2, 240, dtype=dtype), name, place, float("nan"))
    expected = run(inputs, config, "reference")[0]
    assert_same_kinds(run(inputs, config, "cpu")[0], expected, name, place)


@needs_kernel
def test_nan_of_any_bits_shows():
    """A NaN carries bits of its own, which must not become the exponent of a finite number."""
    config, inputs = make_config(12, C), make_inputs(1, 28, dtype=torch.float32)
    for bits in (0x7F800001, 0x7FC001FF, -1, -0x3FFFFF):
        k = inputs.k.clone()
        k.view(torch.int32)[0, 22] = bits
        o = run(inputs._replace(k=k), config, "cpu")[0]
        assert o[0, 22:].isnan().all()
        assert o[0, :22].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_show_it_too(name):
    """A training step on such a call never looks healthy."""
    inputs = spoiled(make_inputs(1, 13, dtype=torch.float32), name, 7, float("nan")).leaves()
    run(inputs, make_config(12, C), "cpu")[0].sum().backward()
    assert not all(x.grad.isfinite().all() for x in inputs)


@needs_kernel
def test_slots_that_nobody_joined_weigh_nothing():
    """Whole blocks of them: their logits are -inf, and so is their maximum."""
    config = make_config(400, 6)
    inputs = make_inputs(1, 20, dtype=torch.float32)
    slots = run(inputs, config, "reference")[2]
    slots.tokens[slots.tokens >= 0] = 399  # fed: slots 0 to 398 stay empty
    o = run(inputs, config, "cpu", slots=slots)[0]
    expected = run(inputs, config, "torch", slots=slots)[0]
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
