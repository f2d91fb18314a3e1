"""Bad input raises ``ValueError`` that names argument and value, in every implementation."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from ovq import DictionaryConfig, OVQState, ovq_attention

from .cases import (
    IMPLEMENTATIONS,
    assert_bits_equal,
    make_config,
    make_inputs,
    needs_kernel,
    run,
    state_bits,
)

pytestmark = pytest.mark.plain

CONFIG = make_config(6, 4)
by_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
with_kernel = pytest.mark.parametrize(
    "impl", [*IMPLEMENTATIONS, pytest.param("cpu", marks=needs_kernel)]
)


def call(impl: str, state=None, dictionary=CONFIG, cu_seqlens=None, **changed):
    """A good call on ``[2, 13, 4, 5]`` with some of its arguments changed."""
    arguments = make_inputs()._asdict() | changed
    return ovq_attention(
        *arguments.values(), state, dictionary=dictionary, cu_seqlens=cu_seqlens, impl=impl
    )


def test_the_unchanged_call_is_good():
    assert call("auto")[0].shape == (2, 13, 4, 3)


SHAPES = [
    ({"q": (2, 13, 20)}, "q", "13, 20"),
    ({"k": (2, 13, 10)}, "k", "13, 10"),
    ({"v": (2, 13, 2, 3, 1)}, "v", "3, 1"),
    ({"k": (2, 13, 2, 6)}, "k", "6"),
    ({"k": (2, 12, 2, 5), "v": (2, 12, 2, 3)}, "k", "12"),
    ({"k": (3, 13, 2, 5), "v": (3, 13, 2, 3)}, "k", "3"),
    ({"v": (2, 12, 2, 3)}, "v", "12"),
    ({"v": (1, 13, 2, 3)}, "v", "1"),
    ({"v": (2, 13, 4, 3)}, "v", "4"),
    ({"k": (2, 13, 3, 5), "v": (2, 13, 3, 3)}, "k|G", "3"),
    ({"k": (2, 13, 8, 5), "v": (2, 13, 8, 3)}, "k|G", "8"),
    ({"k": (2, 13, 0, 5), "v": (2, 13, 0, 3)}, "heads|k|G", "0"),
    ({"beta": (3,)}, "beta", "3"),
    ({"beta": (1,)}, "beta", "1"),
    ({"beta": (2, 4)}, "beta", "2, 4"),
    ({"beta": ()}, "beta", r"\(\)"),
]


@pytest.mark.parametrize(("shapes", "name", "value"), SHAPES, ids=str)
@by_implementation
def test_shapes(impl, shapes, name, value):
    changed = {n: torch.ones(shape, dtype=torch.float64) for n, shape in shapes.items()}
    with pytest.raises(ValueError, match=rf"\b({name})\b.*must.*{value}"):
        call(impl, **changed)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.complex128, torch.bool], ids=str
)
@by_implementation
def test_dtypes(impl, name, dtype):
    inputs = make_inputs()
    with pytest.raises(ValueError, match=rf"\b[{name}k]\b.*dtype.*{dtype}"):
        call(impl, **{name: getattr(inputs, name).to(dtype)})


@by_implementation
def test_integer_inputs_throughout(impl):
    whole = {n: x.long() for n, x in make_inputs()._asdict().items() if n != "beta"}
    with pytest.raises(ValueError, match=r"\bq\b.*dtype.*int64"):
        call(impl, **whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@by_implementation
def test_beta_must_be_finite(impl, value):
    with pytest.raises(ValueError, match=rf"beta must be finite.*{value}"):
        call(impl, beta=value)
    beta = torch.tensor([1.0, 2.0, value, 3.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"beta must be finite.*{value}"):
        call(impl, beta=beta)
    with pytest.raises(ValueError, match=r"beta must"):
        call(impl, beta=torch.ones(4, dtype=torch.int64))


@pytest.mark.parametrize("number", [1e300, -1e39, 10**400])
@with_kernel
def test_beta_must_be_finite_in_the_dtype_of_the_softmax(impl, number):
    single = make_inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"beta must be finite in torch.float32, got -?1"):
        call(impl, **single._asdict() | {"beta": number})
    if abs(number) < 1e308:
        double = torch.full((4,), number, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"beta must be finite in torch.float32"):
            call(impl, **single._asdict() | {"beta": double})
        assert call("torch", beta=number / 1e290)[0].isfinite().all()


WRONG_TYPES = [
    *((name, value) for name in "qkv" for value in (None, [[1.0]], "q", 3)),
    *(("beta", value) for value in ("8", None, [8.0], True, 1j)),
    *(("state", value) for value in ({}, "state", 0, torch.ones(3))),
    *(("cu_seqlens", value) for value in ([0, 13], (0, 13), 13, "0 13")),
    *(("dictionary", value) for value in (None, {}, "paper")),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
@by_implementation
def test_types(impl, name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        call(impl, **{name: value})


BROKEN_PARTS = [
    ("num_active", torch.tensor([-1, 3])),
    ("num_active", torch.tensor([3, 7])),
    ("num_active", torch.tensor(3)),
    ("num_absorbed", torch.tensor([4, -4])),
    ("num_absorbed", torch.tensor([4])),
    ("tail_length", torch.tensor([2, -1])),
    ("tail_length", torch.tensor([4, 2])),
    ("tail_length", torch.tensor([2])),
    ("tail_length", torch.tensor([2, 2], dtype=torch.int32)),
    ("tail_keys", torch.ones(2, 3, 2, 5)),
    ("tail_values", torch.ones(2, 4, 2, 2)),
    ("key_means", torch.ones(2, 2, 5, 5)),
    ("value_means", torch.ones(2, 2, 5, 3)),
    ("value_means", torch.ones(2, 2, 6, 3, dtype=torch.bfloat16)),
    ("counts", torch.ones(2, 2, 5, dtype=torch.int64)),
    ("counts", torch.ones(2, 2, 6, dtype=torch.int32)),
]


@pytest.mark.parametrize(("name", "value"), BROKEN_PARTS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@with_kernel
def test_a_state_made_by_hand(impl, num_tokens, name, value):
    """Its numbers say where in memory the rest lies."""
    inputs = make_inputs(T=13, dtype=torch.float32)
    state = run(inputs.tokens(0, 6), CONFIG, "reference")[1]
    broken = replace(state, **{name: value})
    with pytest.raises(ValueError, match=rf"^state must have {name} (of|within) .*, got "):
        run(inputs.tokens(0, num_tokens), CONFIG, impl, broken)


@pytest.mark.parametrize(
    ("batch", "changed", "values"),
    [
        (3, {}, "2.*3"),
        (1, {}, "2.*1"),
        (2, {"G": 4}, "2.*4"),
        (2, {"K": 6}, "5.*6"),
        (2, {"V": 4}, "3.*4"),
        (2, {"dtype": torch.float32}, "float64.*float32"),
    ],
    ids=str,
)
@by_implementation
def test_a_state_of_other_inputs(impl, batch, changed, values):
    """Both sizes are named, and the state is left as it was."""
    state = run(make_inputs(batch, 6, **changed), CONFIG, "reference")[1]
    before = state_bits(state)
    with pytest.raises(ValueError, match=rf"(?s)\bstate must.*{values}"):
        call(impl, state)
    assert_bits_equal(state_bits(state), before)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_centroids": 7},
        {"chunk_size": 5},
        {"growth": "immediate"},
        {"seeding": "novel"},
        {"seed": 1},
        {"rate": "constant"},
        {"step": 0.2},
        {"centroid": "unit"},
    ],
    ids=str,
)
@by_implementation
def test_a_state_of_another_configuration(impl, changed):
    state = run(make_inputs(2, 6), CONFIG, "reference")[1]
    (name, value), *_ = changed.items()
    with pytest.raises(ValueError, match=rf"(?s)\bstate must.*{name}={value!r}"):
        call(impl, state, replace(CONFIG, **changed))


@pytest.mark.parametrize(
    ("ends", "rule"),
    [
        ([1, 13], "1, 13"),
        ([0, 12], "0, 12"),
        ([0, 14], "0, 14"),
        ([0, 8, 5, 13], "8, 5"),
        ([0, -1, 13], "-1"),
        ([13], "cu_seqlens"),
        ([0], "cu_seqlens"),
        ([], "cu_seqlens"),
        ([[0, 13]], "cu_seqlens"),
        ([0.0, 13.0], "float"),
        ([False, True], "(bool|True)"),
    ],
    ids=str,
)
@by_implementation
def test_cu_seqlens(impl, ends, rule):
    one = make_inputs(1)
    assert (
        call(impl, cu_seqlens=torch.tensor([0, 5, 13]), q=one.q, k=one.k, v=one.v)[1].num_rows == 2
    )
    with pytest.raises(ValueError, match=rf"cu_seqlens must.*{rule}|{rule} must"):
        call(impl, cu_seqlens=torch.tensor(ends), q=one.q, k=one.k, v=one.v)


@by_implementation
def test_cu_seqlens_needs_one_batch_row_and_a_state_row_a_sequence(impl):
    with pytest.raises(ValueError, match=r"B = 1.*cu_seqlens.*2"):
        call(impl, cu_seqlens=torch.tensor([0, 13]))
    one, state = make_inputs(1), run(make_inputs(3, 6), CONFIG, "reference")[1]
    with pytest.raises(ValueError, match=r"(?s)state must.*2.*3"):
        call(impl, state, cu_seqlens=torch.tensor([0, 5, 13]), q=one.q, k=one.k, v=one.v)


@pytest.mark.parametrize(("impl", "error"), [("fastest", ValueError), ("", ValueError)])
def test_unknown_implementation_lists_the_known(impl, error):
    with pytest.raises(error, match=r"impl.*reference.*torch"):
        call(impl)


def test_planned_implementation_says_what_there_is():
    with pytest.raises((ValueError, NotImplementedError), match=r"triton.*reference.*torch"):
        call("triton")


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("num_centroids", 0, {}),
        ("num_centroids", -3, {}),
        ("num_centroids", 2.5, {}),
        ("chunk_size", 0, {}),
        ("chunk_size", -1, {}),
        ("growth", "logistic", {}),
        ("growth_length", None, {"growth": "linear"}),
        ("growth_length", 0, {"growth": "linear"}),
        ("growth_length", -5, {"growth": "linear"}),
        ("growth_length", 2.5, {"growth": "linear"}),
        ("seeding", "farthest", {}),
        ("seed", 0.5, {"seeding": "random"}),
        ("rate", "fast", {}),
        ("step", -0.1, {"rate": "constant"}),
        ("step", 1.5, {"rate": "constant"}),
        ("step", float("nan"), {"rate": "constant"}),
        ("centroid", "median", {}),
        ("centroid", None, {}),
    ],
)
def test_dictionary_fields(name, value, others):
    fields = {"num_centroids": 8, "chunk_size": 4} | others | {name: value}
    with pytest.raises(ValueError, match=rf"\b{name} must.*{value!r}"):
        DictionaryConfig(**fields)


def test_dictionary_is_frozen_and_takes_its_own_fields_by_name_only():
    with pytest.raises(FrozenInstanceError):
        CONFIG.num_centroids = 7
    with pytest.raises(TypeError):
        DictionaryConfig(8, 4)
    with pytest.raises(TypeError, match="num_codes"):
        DictionaryConfig(num_centroids=8, chunk_size=4, num_codes=2)
    with pytest.raises(TypeError, match="chunk_size"):
        DictionaryConfig(num_centroids=8)


@by_implementation
def test_dictionary_of_another_type(impl):
    with pytest.raises(ValueError, match=r"dictionary must be a DictionaryConfig.*dict"):
        call(impl, dictionary={"num_centroids": 8, "chunk_size": 4})


def test_states_are_immutable():
    state = OVQState.empty(2, 2, 5, 3, dictionary=CONFIG)
    with pytest.raises(FrozenInstanceError):
        state.counts = state.counts + 1
