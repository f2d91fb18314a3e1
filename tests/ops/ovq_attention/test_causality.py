"""Outputs depend on the past, on all of it, and on nothing later."""

import pytest
import torch

from .cases import (
    IMPLEMENTATIONS,
    VARIANTS,
    make_config,
    make_inputs,
    phased_state,
    run,
    state_leaves,
)

C, T = 4, 13
by_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
by_variant = pytest.mark.parametrize("variant", VARIANTS)


def jacobian_norms(impl: str, config) -> dict[str, torch.Tensor]:
    """``[T, T]`` for q, k and v: how much the output at one position moves with another's input."""
    inputs = make_inputs(1, T, H=2, G=1, V=2).leaves()
    o, _, _ = run(inputs, config, impl)
    norms = {name: torch.zeros(T, T) for name in "qkv"}
    for position in range(T):
        for value in range(o.shape[-1]):
            found = torch.autograd.grad(o[0, position, 0, value], inputs[:3], retain_graph=True)
            for name, grad in zip("qkv", found, strict=True):
                norms[name][position] += grad[0].flatten(1).square().sum(-1)
    return {name: norm.sqrt() for name, norm in norms.items()}


@by_variant
@by_implementation
def test_jacobian_is_lower_triangular_and_full(impl, variant):
    """Every earlier token lives on in some slot: no entry at or below the diagonal is zero, but
    that of a lone first token, whose weight is 1 whatever its key. Where slots stay as their first
    chunk left them, what joins later leaves no trace but a count."""
    norms = jacobian_norms(impl, make_config(5, C, **VARIANTS[variant]))
    for name in "kv":
        assert not norms[name].triu(1).any(), f"output sees a later {name}"
        lower = norms[name][torch.ones(T, T).tril().bool()]
        if variant != "constant-kept":
            assert (lower[1:] > 1e-9).all(), f"output misses an earlier {name}"
    assert norms["v"][0, 0] == pytest.approx(1.4142136, rel=1e-6)  # o_0 = v_0, V = 2
    diagonal = norms["q"].diagonal()
    assert torch.equal(norms["q"], diagonal.diag()), "output sees another token's query"
    assert (diagonal[1:] > 1e-6).all()


@pytest.mark.parametrize("position", [1, C, 2 * C + 1])
@by_variant
@by_implementation
def test_large_later_tokens_change_nothing(impl, variant, position):
    config, inputs = make_config(5, C, **VARIANTS[variant]), make_inputs(2, T)
    o, _, slots = run(inputs, config, impl)
    large = [x.clone() for x in inputs[:3]]
    for tensor in large:
        tensor[:, position:] = -1e4 * tensor[:, position:] + 7e3
    o_large, _, slots_large = run(inputs._replace(q=large[0], k=large[1], v=large[2]), config, impl)
    assert torch.equal(o_large[:, :position], o[:, :position])
    assert (o_large[:, position:] - o[:, position:]).norm(dim=-1).amin() > 1.0
    done = position // C * C
    assert torch.equal(slots_large.tokens[:, :done], slots.tokens[:, :done])


@pytest.mark.parametrize("window_chunks", [0, 2])
@by_implementation
def test_every_part_of_a_state_reaches_every_later_output(impl, window_chunks):
    config = make_config(5, C, window_chunks=window_chunks)
    state, leaves = state_leaves(phased_state(config, (4 * C + 2, 3)))
    o, _, _ = run(make_inputs(2, 2 * C + 1), config, impl, state)
    for position in range(2 * C + 1):
        for row, parts in ((0, leaves), (1, leaves[2:])):
            loss = o[row, position].square().sum()
            for leaf, grad in zip(
                parts, torch.autograd.grad(loss, parts, retain_graph=True), strict=True
            ):
                held = leaf[row] != 0
                assert held.any()
                assert (grad[row][held] != 0).all()
                assert not grad[1 - row].any()
