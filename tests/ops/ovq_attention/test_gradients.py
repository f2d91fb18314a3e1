"""Gradients against finite differences, and how they behave across calls and steps."""

from dataclasses import replace

import pytest
import torch

from .cases import (
    IMPLEMENTATIONS,
    REAL_FIELDS,
    VARIANTS,
    assert_all_near,
    generator,
    gradients,
    make_config,
    make_inputs,
    phased_state,
    real_tensors,
    run,
)

C = 3
by_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@pytest.mark.parametrize("past", [0, 2, 3 * C + 1])
@pytest.mark.parametrize(
    "variant",
    [
        "paper", "unit", "constant", "constant-unit-linear", "window-unit", "window-novel",
        "window-random-direction",
    ],
)  # fmt: skip
@by_implementation
def test_finite_differences(impl, variant, past):
    """Of output and returned state, to q, k, v, beta and what the state holds; slots are fed."""
    config = make_config(4, C, **VARIANTS[variant])
    sizes = {"H": 2, "G": 1, "K": 2, "V": 2}
    state, inputs = phased_state(config, (past,), **sizes), make_inputs(1, 3 * C + 1, **sizes)
    slots = run(inputs, config, impl, state)[2]
    n, waiting = int(state.num_active), int(state.tail_length)
    sizes_held = {"key_means": n, "value_means": n, "tail_keys": waiting, "tail_values": waiting}
    axis = {name: 1 if "tail" in name else 2 for name in REAL_FIELDS}
    held = [getattr(state, f).narrow(axis[f], 0, sizes_held[f]) for f in REAL_FIELDS]

    def call(q, k, v, beta, *parts):
        fields = {}
        for name, part in zip(REAL_FIELDS, parts, strict=True):
            empty = getattr(state, name).narrow(axis[name], 0, 0)
            rest = getattr(state, name).shape[axis[name]] - sizes_held[name]
            shape = [rest if i == axis[name] else d for i, d in enumerate(empty.shape)]
            fields[name] = torch.cat([part, part.new_zeros(shape)], dim=axis[name])
        o, after, _ = run((q, k, v, beta), config, impl, replace(state, **fields), slots=slots)
        return tuple(real_tensors(o, after))

    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *held)]
    assert torch.autograd.gradcheck(call, leaves, rtol=1e-6, atol=1e-8, fast_mode=True)


@by_implementation
def test_gradient_does_not_depend_on_what_else_is_asked_for(impl):
    config, names = make_config(5, C), "qkvb"
    every = make_inputs(2, 14).leaves()
    o, state, _ = run(every, config, impl)
    whole = gradients(real_tensors(o, state), every)
    for index in range(4):
        own = [x.detach() for x in every]
        own[index].requires_grad_()
        o, state, _ = run(tuple(own), config, impl)
        found = gradients(real_tensors(o, state), own[index : index + 1])
        assert_all_near(found, whole[index : index + 1], 1e-13, names[index])
    of_o = gradients([run(every, config, impl)[0]], every)
    of_state = gradients(real_tensors(*run(every, config, impl)[:2])[1:], every[1:3])
    assert all(g.any() for g in of_o + of_state)


@by_implementation
def test_without_gradients_the_numbers_are_the_same(impl):
    inputs, config = make_inputs(2, 14), make_config(5, C)
    tracked = real_tensors(*run(inputs.leaves(), config, impl)[:2])
    assert all(x.requires_grad for x in tracked)
    with torch.no_grad():
        untracked = real_tensors(*run(inputs.leaves(), config, impl)[:2])
    with torch.inference_mode():
        inference = real_tensors(*run(inputs, config, impl)[:2])
    plain = real_tensors(*run(inputs, config, impl)[:2])
    assert not any(x.requires_grad for x in untracked + plain + inference)
    assert_all_near(untracked, tracked, 1e-14, "no_grad:")
    assert_all_near(inference, tracked, 1e-14, "inference_mode:")
    assert_all_near(plain, tracked, 1e-14, "nothing requires grad:")


@by_implementation
def test_gradient_reaches_back_through_calls_until_detached(impl):
    config = make_config(5, C)
    first, second = make_inputs(1, 8).leaves(), make_inputs(1, 5, seed=9).leaves()
    _, state, _ = run(first, config, impl)
    through = gradients([run(second, config, impl, state)[0]], first[1:3])
    assert all((g[0].flatten(1).norm(dim=-1) > 0).all() for g in through)
    cut = state.detach()
    assert not any(getattr(cut, name).requires_grad for name in REAL_FIELDS)
    o, _, _ = run(second, config, impl, cut)
    assert not any(g.any() for g in gradients([o], first))
    assert all(g.any() for g in gradients([o], second))


@by_implementation
def test_training_steps_with_a_carried_state(impl):
    """Three steps, the state detached between them: no stale graph, and the loss falls."""
    config, data = make_config(5, C), make_inputs(2, 14, dtype=torch.float32)
    weight = torch.eye(5).requires_grad_()
    log_beta = torch.zeros(4, requires_grad=True)
    target = torch.randn(data.v.shape[0], 14, 4, 3, generator=generator(6))
    optimizer = torch.optim.SGD([weight, log_beta], lr=0.5)

    def loss_from(state):
        o, after, _ = run((data.q @ weight, data.k, data.v, log_beta.exp()), config, impl, state)
        return (o - target).square().mean(), after.detach()

    before = loss_from(None)[0].item()
    state = None
    for _ in range(3):
        loss, state = loss_from(state)
        optimizer.zero_grad()
        loss.backward()
        assert weight.grad.any()
        assert log_beta.grad.any()
        optimizer.step()
    assert state.num_tokens.tolist() == [42, 42]
    assert loss_from(None)[0].item() < before


@pytest.mark.parametrize("variant", ["paper", "random", "novel-unit", "window-novel"])
def test_backward_keeps_no_dictionary_per_chunk(variant):
    """Bytes kept for the backward grow by the tokens' own size and a few numbers, no more."""
    config = make_config(64, 8, **{**VARIANTS[variant], "growth": "immediate"})

    def kept_bytes(num_tokens: int) -> int:
        storages = {}

        def note(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = make_inputs(1, num_tokens, H=1, G=1, K=16, V=16, dtype=torch.float32).leaves()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            o, state, _ = run(inputs, config, "torch")
            loss = o.sum() + state.key_means.sum()
        kept = sum(storages.values())
        loss.backward()
        return kept

    per_token = (kept_bytes(192) - kept_bytes(64)) / 128
    tokens = 3 * 16 * 4  # q, k, v, 16 numbers of 4 bytes each; o may be kept too
    assert tokens <= per_token <= tokens + 64 + 64  # a dictionary a chunk would add 1024
