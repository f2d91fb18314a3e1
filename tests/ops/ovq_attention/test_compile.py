"""``torch.compile(fullgraph=True)`` takes the operator, and changes no number."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ovq import ovq_attention

from .cases import (
    REAL_FIELDS,
    WHOLE_FIELDS,
    assert_all_near,
    assert_bits_equal,
    assert_near,
    gradients,
    make_config,
    make_inputs,
    phased_state,
    real_tensors,
    state_bits,
    state_leaves,
)

pytestmark = [
    pytest.mark.plain,
    # Dynamo looks at `.grad` of every input, also where it is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

C = 4
CONFIG = make_config(5, C)
WINDOWED = make_config(5, C, window_chunks=2, centroid="direction")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graph of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attend(q, k, v, beta, state):
    """A little of a model around the operator."""
    o, after = ovq_attention(2 * q, k, v, beta.exp(), state, dictionary=CONFIG, impl="torch")
    return 3 * o, after


def attend_with_a_window(q, k, v, beta, state):
    """The same beside a window."""
    o, after = ovq_attention(2 * q, k, v, beta.exp(), state, dictionary=WINDOWED, impl="torch")
    return 3 * o, after


def from_the_start(q, k, v, beta):
    """The same, without a state."""
    o, after = ovq_attention(2 * q, k, v, beta.exp(), dictionary=CONFIG, impl="torch")
    return 3 * o, after


@pytest.mark.parametrize("num_tokens", [1, C, 3 * C + 1])
def test_compiled_equals_eager(num_tokens):
    compiled = torch.compile(from_the_start, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, from_the_start):
        leaves = make_inputs(2, num_tokens).leaves()
        o, state = function(*leaves)
        found.append((o, state, gradients(real_tensors(o, state), leaves)))
    (o, state, grads), (o_eager, state_eager, grads_eager) = found
    assert_near(o, o_eager, 1e-13)
    assert_bits_equal(state_bits(state), state_bits(state_eager))
    assert_all_near(grads, grads_eager, 1e-13, "gradient of q, k, v, beta:")
    assert all(g.any() for g in grads_eager[1:3])


@pytest.mark.parametrize(
    ("eager", "config"), [(attend, CONFIG), (attend_with_a_window, WINDOWED)], ids=["0", "2 C"]
)
def test_compiled_equals_eager_with_a_carried_state(eager, config):
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    start, found = phased_state(config, (3, 3 * C + 2)), []
    for function in (compiled, eager):
        leaves = make_inputs(2, 2 * C + 1).leaves()
        state, of_state = state_leaves(start)
        o, after = function(*leaves, state)
        o_next, after = function(*make_inputs(2, 1, seed=4), after)
        found.append(gradients(real_tensors(o_next, after) + [o], [*leaves, *of_state]))
        found.append(
            [o.detach(), *(getattr(after, n).detach() for n in REAL_FIELDS + WHOLE_FIELDS)]
        )
    assert_all_near(found[0], found[2], 1e-13, "gradient:")
    assert_all_near(found[1], found[3], 1e-13, "output and state:")


def test_compiled_without_gradients_equals_eager():
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    start, inputs = phased_state(CONFIG, (3, 3 * C + 2)), make_inputs(2, 2 * C + 1)
    before = state_bits(start)
    with torch.no_grad():
        o, after = compiled(*inputs, start)
        o_eager, after_eager = attend(*inputs, start)
    assert_near(o, o_eager, 1e-13)
    assert_bits_equal(state_bits(after), state_bits(after_eager))
    assert_bits_equal(state_bits(start), before)


def test_another_length_does_not_recompile_for_ever():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    state = phased_state(CONFIG, (3, 5))
    for num_tokens in range(6, 22):
        o, after = compiled(*make_inputs(2, num_tokens), state)
        assert_near(o, attend(*make_inputs(2, num_tokens), state)[0], 1e-13)
        assert after.num_tokens.tolist() == [3 + num_tokens, 5 + num_tokens]
    assert 1 <= counter.frame_count <= 3


def test_decoding_does_not_recompile_for_ever():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    inputs, state, outputs = make_inputs(2, 3 * C + 1), None, []
    _, state = attend(*inputs.tokens(0, 1), None)
    for position in range(1, 3 * C + 1):
        o, state = compiled(*inputs.tokens(position, position + 1), state)
        outputs.append(o)
    assert_near(torch.cat(outputs, dim=1), attend(*inputs, None)[0][:, 1:], 1e-12)
    assert 1 <= counter.frame_count <= 3
