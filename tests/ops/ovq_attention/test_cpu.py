"""The C++ kernel equals ``reference`` and itself, at any length, shape, split and thread count."""

import logging
from contextlib import contextmanager
from itertools import pairwise, product
from typing import get_args

import pytest
import torch

from ovq import OVQState
from ovq.ops.ovq_attention import api
from ovq.ops.ovq_attention.cpu import build, kernel
from ovq.ops.ovq_attention.dictionary import Centroid

from .cases import (
    VARIANTS,
    WHOLE_FIELDS,
    Inputs,
    assert_all_near,
    assert_bits_equal,
    assert_near,
    assert_states_near,
    gradients,
    make_config,
    make_inputs,
    needs_kernel,
    phased_state,
    real_tensors,
    run,
    state_bits,
    state_leaves,
    uneven_vectors,
    unit_vectors,
    zipf_vectors,
)

C = 6
SERVED = {name: fields for name, fields in VARIANTS.items() if fields.get("rate") != "constant"}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}


def in_dtype(state: OVQState | None, dtype: torch.dtype) -> OVQState | None:
    """The state with its real tensors in another dtype."""
    if state is None:
        return None
    return state.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


def results(inputs: Inputs, config, impl: str, state=None, **options):
    """Slots, state, and everything differentiable that a call returns, with all its gradients."""
    leaves, of_state = list(inputs.leaves()), []
    own = Inputs(*leaves)
    if state is not None:
        state, of_state = state_leaves(state)
    o, after, slots = run(own, config, impl, state, **options)
    tensors = real_tensors(o, after)
    return slots, after, [x.detach() for x in tensors] + gradients(tensors, leaves + of_state)


def compare(
    inputs: Inputs, config, state=None, dtype=torch.float32, *, tolerance=None, fed=False, **options
) -> None:
    """The kernel against the reference in float64 on the same rounded numbers.

    In bfloat16, and where ``fed``, on the slots of the reference: rounding may decide between
    near-equal centroids.
    """
    inputs, state = inputs.to(dtype), in_dtype(state, torch.float32)
    slots, after, expected = results(
        inputs.to(torch.float64), config, "reference", in_dtype(state, torch.float64), **options
    )
    if fed or dtype == torch.bfloat16:
        options["slots"] = slots
    found_slots, found_after, found = results(inputs, config, "cpu", state, **options)
    for mine, reference in zip(found_slots, slots, strict=True):
        assert torch.equal(mine, reference)
    for name in WHOLE_FIELDS:
        assert torch.equal(getattr(found_after, name), getattr(after, name)), name
    assert [x.dtype for x in found[:2]] == [dtype, torch.float32]
    assert_all_near(found, expected, tolerance or TOLERANCE[dtype], "o, state, gradients:")
    assert_all_near(found[1:5], expected[1:5], 1e-6, "state:")


@contextmanager
def threads(count: int):
    """A block run on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, 3 * C + 5])
@pytest.mark.parametrize("variant", SERVED)
def test_equals_reference_from_a_state_at_unlike_phases(variant, num_tokens):
    config = make_config(5, C, **SERVED[variant])
    state = phased_state(config, (0, C - 2, C, 4 * C + 1), keys=zipf_vectors)
    compare(make_inputs(4, num_tokens, seed=num_tokens + 10, keys=zipf_vectors), config, state)


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("sizes", "chunk_size", "num_centroids"),
    [
        ({"H": 1, "G": 1, "K": 1, "V": 1}, 1, 1),
        ({"H": 3, "G": 1, "K": 17, "V": 40}, 20, 40),
        ({"H": 4, "G": 2, "K": 64, "V": 32}, 100, 150),
        ({"H": 2, "G": 2, "K": 33, "V": 9}, 64, 16),
        ({"H": 8, "G": 1, "K": 8, "V": 128}, 128, 300),
    ],
    ids=str,
)
def test_equals_reference_at_awkward_shapes(sizes, chunk_size, num_centroids, dtype):
    config = make_config(num_centroids, chunk_size)
    compare(make_inputs(1, 2 * chunk_size + 77, seed=3, **sizes), config, dtype=dtype)


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", ["paper", "random", "novel-unit"])
def test_packed_sequences_equal_reference(variant, dtype):
    lengths = (0, 7, 1, 0, 10, 13, 0)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    config = make_config(6, 5, **SERVED[variant])
    state = phased_state(config, (3, 4, 4, 0, 5, 12, 9))
    for start in (None, state):
        compare(make_inputs(1, sum(lengths)), config, start, dtype, cu_seqlens=ends)


by_window = pytest.mark.parametrize("window_chunks", [0, 1, 2])
by_comparison = pytest.mark.parametrize(
    ("centroid", "seeding"), list(product(get_args(Centroid), ["spread", "novel"]))
)


@needs_kernel
@by_window
@by_comparison
def test_gradients_through_split_calls_equal_those_of_one(window_chunks, centroid, seeding):
    """From rows at unlike phases: what a later call sends to a tail must reach its tokens."""
    config = make_config(12, 4, window_chunks=window_chunks, centroid=centroid, seeding=seeding)
    start = phased_state(config, (0, 7, 26))
    inputs = make_inputs(3, 27)
    _, after, expected = results(inputs, config, "reference", start)
    leaves = Inputs(*inputs.to(torch.float32).leaves())
    state, of_state = state_leaves(in_dtype(start, torch.float32))
    outputs = []
    for first, stop in pairwise((0, 1, 6, 18, 27)):
        o, state, _ = run(leaves.tokens(first, stop), config, "cpu", state)
        outputs.append(o)
    assert_states_near(state.map(lambda x: x.detach()), in_dtype(after, torch.float32), 1e-6)
    found = real_tensors(torch.cat(outputs, dim=1), state)
    found = [x.detach() for x in found] + gradients(found, [*leaves, *of_state])
    assert_all_near(found, expected, TOLERANCE[torch.float32], "o, state, gradients:")


@needs_kernel
@by_window
@by_comparison
def test_long_sequences_of_keys_of_unlike_norms_equal_reference(window_chunks, centroid, seeding):
    """Packed, from tails of unlike lengths; at unit norm alone where norms would be divided out."""
    config = make_config(48, 32, window_chunks=window_chunks, centroid=centroid, seeding=seeding)
    sizes = {"H": 4, "G": 2, "K": 16, "V": 24}
    keys = unit_vectors if centroid == "unit" else uneven_vectors
    state = phased_state(config, (0, 140, 41), K=16, V=24, keys=keys)
    inputs = make_inputs(1, 700, keys=keys, **sizes)
    inputs = inputs._replace(beta=inputs.beta / 4.0)
    ends = torch.tensor([0, 420, 421, 700])
    compare(inputs, config, state, tolerance=1e-5, fed=True, cu_seqlens=ends)


@needs_kernel
@pytest.mark.parametrize("cuts", [range(1, 100), [1, 2, 31, 32, 33, 90]], ids=["decode", "parts"])
@pytest.mark.parametrize("variant", ["paper", "unit", "window-novel", "direction"])
def test_any_split_equals_one_call(variant, cuts):
    """Also token by token, from rows at unlike phases; the rows of few tokens take another path."""
    config = make_config(20, 32, **SERVED[variant])
    start = in_dtype(phased_state(config, (0, 5, 31, 32, 100), K=16, V=8), torch.float32)
    inputs = make_inputs(5, 100, K=16, V=8, dtype=torch.float32)
    whole, after, slots = run(inputs, config, "cpu", start)
    outputs, state, edges = [], start, [0, *cuts, 100]
    for first, stop in pairwise(edges):
        o, state, _ = run(inputs.tokens(first, stop), config, "cpu", state)
        outputs.append(o)
    assert_near(torch.cat(outputs, dim=1), whole, 1e-6)
    assert_states_near(state, after, 1e-6)
    for row in range(5):
        alone = start.select_rows(torch.tensor([row]))
        o, after_row, slots_row = run(inputs.row(row), config, "cpu", alone)
        assert torch.equal(o, whole[row : row + 1])
        assert torch.equal(slots_row.tokens, slots.tokens[row : row + 1])
        assert_states_near(after_row, after.select_rows(torch.tensor([row])), 0.0)


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (3, 1, 1)], ids=str)
def test_one_and_two_threads_agree_bit_for_bit(sizes, dtype):
    """Whether heads share the threads or the rows of one head's chunk do; run again as well."""
    B, H, G = sizes
    config = make_config(40, 32)
    inputs = make_inputs(B, 150, H, G, K=24, V=16).to(dtype)
    found = []
    for count in (1, 2, 2):
        with threads(count):
            slots, after, tensors = results(inputs, config, "cpu")
            o, decoded, _ = run(inputs.tokens(0, 1), config, "cpu", after.detach())
        found.append([*slots, *tensors, o, *state_bits(decoded).values()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernel
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
def test_the_incoming_state_is_never_changed_and_shared_only_if_whole(num_tokens):
    config = make_config(6, 5)
    state = in_dtype(phased_state(config, (1, 22)), torch.float32)
    before, inputs = state_bits(state), make_inputs(2, num_tokens, dtype=torch.float32)
    after = run(inputs, config, "cpu", state)[1]
    assert_bits_equal(state_bits(state), before)
    shared = after.key_means.data_ptr() == state.key_means.data_ptr()
    assert shared == (num_tokens < 3)
    assert after.tail_keys.data_ptr() != state.tail_keys.data_ptr()


@needs_kernel
@pytest.mark.parametrize("norm", [0.0, 1e4])
@pytest.mark.parametrize("beta", [0.0, 1e3, -1.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extreme_values_give_finite_numbers(dtype, beta, norm):
    inputs = make_inputs(2, 70, K=16, V=8)
    scaled = Inputs(inputs.q, norm * inputs.k, inputs.v, torch.full_like(inputs.beta, beta))
    _, _, found = results(scaled.to(dtype), make_config(12, 16), "cpu")
    assert all(x.isfinite().all() for x in found)


@needs_kernel
def test_identical_keys_equal_reference():
    """The gradient of the queries is 0 here, so that what comes is rounding alone."""
    inputs = make_inputs(1, 50, K=16)
    same = inputs._replace(k=inputs.k[:, :1].expand_as(inputs.k))
    compare(same, make_config(12, 8), tolerance=1e-4)


@needs_kernel
def test_noncontiguous_inputs_and_outputs():
    config, inputs = make_config(12, 8), make_inputs(2, 30, dtype=torch.float32)
    apart = Inputs(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]), inputs.beta
    )
    q = apart.q.requires_grad_()
    o = run(apart, config, "cpu")[0]
    assert torch.equal(o, run(inputs, config, "cpu")[0])
    (grad,) = torch.autograd.grad(o.sum(), [q])  # an expanded gradient
    assert grad.shape == q.shape


@needs_kernel
@pytest.mark.parametrize("slot", [-1, 6])
def test_fed_slots_outside_the_dictionary_are_refused(slot):
    config, inputs = make_config(6, 5), make_inputs(1, 12, dtype=torch.float32)
    slots = run(inputs, config, "cpu")[2]
    slots.tokens[0, 3, 1] = slot
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 6\)"):
        run(inputs, config, "cpu", slots=slots)


@needs_kernel
def test_auto_takes_the_kernel_where_it_serves_and_says_so_once(caplog):
    api._say_once.cache_clear()
    inputs, config = make_inputs(1, 9, dtype=torch.float32), make_config()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        o = run(inputs, config, "auto")[0]
        run(inputs, config, "auto")
        assert [r.message for r in caplog.records] == ["impl='auto' chose 'cpu'"]
        assert torch.equal(o, run(inputs, config, "cpu")[0])
        run(inputs.to(torch.float64), config, "auto")
        run(inputs, make_config(rate="constant"), "auto")
    assert [r.message.split(":")[0] for r in caplog.records[1:]] == [
        "impl='auto' chose 'torch'"
    ] * 2


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_what_the_kernel_does_not_take_is_refused_by_name(dtype):
    with pytest.raises(
        ValueError, match=f"'cpu' takes float32 and bfloat16, got {dtype}; .*'torch'"
    ):
        run(make_inputs(1, 3, dtype=dtype), make_config(), "cpu")
    with pytest.raises(ValueError, match="'cpu' takes rate='mean', got 'constant'"):
        run(make_inputs(1, 3, dtype=torch.float32), make_config(rate="constant"), "cpu")


def test_without_the_library_auto_runs_and_cpu_says_how_to_build(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(kernel, "_path", lambda: tmp_path / "none.so")
    api._say_once.cache_clear()
    inputs, config = make_inputs(1, 9, dtype=torch.float32), make_config()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        o = run(inputs, config, "auto")[0]
    assert torch.equal(o, run(inputs, config, "torch")[0])
    assert "chose 'torch': 'cpu' is not built" in caplog.text
    with pytest.raises(ValueError, match=r"not built; `python -m ovq.ops.ovq_attention.cpu.build`"):
        run(inputs, config, "cpu")


def test_a_build_without_a_compiler_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler .*no 'no-such-compiler'"):
        build.build()
    assert list(tmp_path.rglob("*.so")) == []


def test_the_cache_follows_source_and_processor(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = build.library_path()
    assert here.is_relative_to(tmp_path / "ovq")
    assert here == build.library_path()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert build.library_path() != here
