"""What in-context regression promises about its sequences, and what its oracles reach."""

import math

import pytest
import torch

from ovq.tasks import InContextRegressionTask, Split, TaskDataset

TASKS = {
    "default": InContextRegressionTask(context_length=128),
    "one function": InContextRegressionTask(context_length=64, num_functions=1),
    "every example its own": InContextRegressionTask(context_length=32, num_functions=16),
    "noise": InContextRegressionTask(context_length=128, num_functions=3, noise_std=0.5),
    "one feature": InContextRegressionTask(context_length=50, num_features=1, num_functions=3),
    "many": InContextRegressionTask(context_length=2048, num_features=4, num_functions=128),
    "curriculum": InContextRegressionTask(context_length=128, initial_functions=1),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def draw(task, seed=0, split=Split.TRAIN, progress=1.0):
    return task.example(torch.Generator().manual_seed(seed), split=split, progress=progress)


def parts_of(task, inputs):
    """Identifier, point, value and mark of every place."""
    return inputs.split([task.code_length, task.num_features, 1, 1], dim=1)


def test_a_point_is_asked_and_then_told(task):
    example = draw(task)
    code, x, value, told = parts_of(task, example["inputs"])
    assert torch.equal(code[::2], code[1::2])
    assert torch.equal(x[::2], x[1::2])
    assert told[:, 0].tolist() == [0.0, 1.0] * task.num_examples
    assert not value[::2].any()
    assert torch.equal(value[1::2], example["targets"][::2])
    assert example["targets"][1::2].isnan().all()
    assert torch.equal(task.asked(example), told[:, 0] == 0)


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_functions_take_turns_and_are_linear(task, progress):
    example, num_functions = draw(task, progress=progress), task.num_functions_at(progress)
    code, x, value, _ = parts_of(task, example["inputs"][1::2])
    codes, functions = code.unique(dim=0, return_inverse=True)
    assert len(codes) == num_functions
    torch.testing.assert_close(codes.norm(dim=1), torch.full((num_functions,), 32.0).sqrt())
    counts = torch.bincount(functions)
    assert counts.max() - counts.min() <= 1
    if task.noise_std == 0.0:
        for function in range(num_functions):
            chosen = functions == function
            weights = torch.linalg.lstsq(x[chosen], value[chosen]).solution
            torch.testing.assert_close(x[chosen] @ weights, value[chosen], atol=1e-4, rtol=1e-4)
            if counts[function] >= task.num_features:
                assert weights.norm() == pytest.approx(1.0, abs=1e-3)


def test_history_counts_the_earlier_examples_of_the_function(task):
    example = draw(task)
    code = example["inputs"][::2, : task.code_length]
    history, functions = task.history(example), []
    for index in range(min(100, task.num_examples)):
        known = [other for other in range(index) if torch.equal(code[other], code[index])]
        functions.append(functions[known[0]] if known else len(set(functions)))
        for place in (2 * index, 2 * index + 1):
            assert history.num_earlier[place] == len(known)
            assert history.function[place] == functions[index]


def test_groups_are_doubling_numbers_of_earlier_examples(task):
    example = draw(task)
    earlier, asked = task.history(example).num_earlier, task.asked(example)
    total = torch.zeros_like(earlier)
    for name, places in task.groups(example).items():
        low, high = ([int(n) for n in name.split()[0].split("-")] * 2)[:2]
        assert torch.equal(places, asked & (earlier >= low) & (earlier <= high)), name
        assert places.any()
        total += places
    assert torch.equal(total, asked.long())


@pytest.mark.parametrize("noise_std", [0.0, 1.0])
def test_zeros_have_an_error_of_one(noise_std):
    task = InContextRegressionTask(context_length=256, noise_std=noise_std)
    errors = [task.errors(draw(task, seed), torch.zeros(128)).mean() for seed in range(60)]
    assert float(torch.stack(errors).mean()) == pytest.approx(1.0, abs=0.06)


def errors_by_number(task, oracle, num_sequences=20, split=Split.TRAIN):
    """Mean error of an oracle for each number of earlier examples."""
    errors, earlier = [], []
    for seed in range(num_sequences):
        example = draw(task, seed, split)
        errors.append(task.errors(example, getattr(task, oracle)(example)))
        earlier.append(task.history(example).num_earlier[::2])
    errors, earlier = torch.cat(errors), torch.cat(earlier)
    return [float(errors[earlier == number].mean()) for number in range(int(earlier.max()) + 1)]


@pytest.mark.parametrize("split", Split)
def test_least_squares_is_exact_once_there_are_as_many_examples_as_features(split):
    """And before, it knows the share of the dimensions that it has seen."""
    task = InContextRegressionTask(context_length=256, num_features=4, num_functions=8)
    errors = errors_by_number(task, "least_squares", split=split)
    assert len(errors) == 16
    assert max(errors[5:]) < 1e-8
    assert errors[4] < 1e-4
    for number in range(4):
        assert errors[number] == pytest.approx(1 - number / 4, abs=0.25)


def test_least_squares_equals_a_solver_at_every_place():
    for name in ("default", "noise", "one feature"):
        task = TASKS[name]
        example = draw(task)
        functions = task.history(example).function[::2]
        told = example["inputs"][1::2, task.code_length : -1].double()
        for oracle, pooled in (("least_squares", False), ("pooled_least_squares", True)):
            found = getattr(task, oracle)(example)
            for place in range(task.num_examples):
                earlier = torch.arange(task.num_examples) < place
                if not pooled:
                    earlier &= functions == functions[place]
                x, y = told[earlier, :-1], told[earlier, -1:]
                weights = torch.linalg.pinv(x) @ y
                expected = (told[place, :-1] @ weights)[0]
                torch.testing.assert_close(found[place], expected, atol=1e-4, rtol=1e-4)


def test_pooled_least_squares_is_right_for_one_function_and_wrong_for_many():
    one = InContextRegressionTask(context_length=128, num_features=4, num_functions=1)
    assert max(errors_by_number(one, "pooled_least_squares", 4)[6:]) < 1e-8
    many = InContextRegressionTask(context_length=256, num_features=4, num_functions=16)
    assert errors_by_number(many, "pooled_least_squares")[-1] > 0.7


def check_nearest_neighbour(task, example):
    found = task.nearest_neighbour(example)
    where = example["inputs"][::2, : task.code_length + task.num_features]
    values = example["targets"][::2, 0].double()
    assert found[0] == 0.0
    for place in range(1, task.num_examples):
        nearest = (where[:place] - where[place]).square().sum(1).argmin()
        assert found[place] == values[nearest]


def test_nearest_neighbour_equals_a_loop_and_is_better_than_nothing():
    task = InContextRegressionTask(context_length=512, num_features=2, num_functions=4)
    for seed in range(3):
        check_nearest_neighbour(task, draw(task, seed))
    crowded = InContextRegressionTask(
        context_length=128, num_features=16, num_functions=32, code_length=2
    )
    check_nearest_neighbour(crowded, draw(crowded))
    errors = errors_by_number(task, "nearest_neighbour", 8)
    assert sum(errors[-20:]) / 20 < 0.3


def test_oracles_read_no_later_place():
    task = TASKS["noise"]
    example = draw(task)
    changed = {name: tensor.clone() for name, tensor in example.items()}
    changed["inputs"][80:, task.code_length :] = 7.0
    for oracle in ("least_squares", "pooled_least_squares", "nearest_neighbour"):
        before, after = (getattr(task, oracle)(each)[:40] for each in (example, changed))
        assert torch.equal(before, after), oracle


def test_splits_differ_in_a_bit_of_every_sequence(task):
    for split in Split:
        for seed in range(20):
            first = draw(task, seed, split)["inputs"][0, task.code_length]
            assert int(first.view(torch.int32)) % 2 == (split is Split.EVALUATE)


def test_identifiers_differ_from_sequence_to_sequence():
    task = TASKS["default"]
    codes = torch.cat([draw(task, seed)["inputs"][::2, :32].unique(dim=0) for seed in range(20)])
    cosines = codes @ codes.T / 32
    cosines.fill_diagonal_(0.0)
    assert cosines.abs().max() < 0.9
    assert float(codes.square().mean()) == pytest.approx(1.0, abs=1e-4)


def test_batches_of_a_dataset():
    task = TASKS["default"]
    batch = TaskDataset(task, num_sequences=4, seed=0, split=Split.TRAIN).batch([0, 3])
    assert batch["inputs"].shape == (2, 128, task.num_inputs)
    assert batch["targets"].shape == (2, 128, 1)
    assert batch["inputs"].dtype == batch["targets"].dtype == torch.float32


def test_curriculum_brings_functions_one_by_one():
    task = InContextRegressionTask(num_functions=128, initial_functions=1)
    assert [task.num_functions_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == [1, 64, 128, 128]
    assert task.without_curriculum().num_functions_at(0.0) == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_length": 33}, "context_length must be even, got 33"),
        ({"num_functions": 257}, "num_functions must be at most context_length / 2 = 256, got 257"),
        ({"num_features": 0}, "num_features must be an integer of at least 1, got 0"),
        ({"code_length": 1}, "code_length must be an integer of at least 2, got 1"),
        ({"noise_std": -0.1}, "noise_std must be finite and not negative, got -0.1"),
        ({"noise_std": math.nan}, "noise_std must be finite and not negative, got nan"),
        ({"initial_functions": 9}, "initial_functions must be at most num_functions = 8, got 9"),
        ({"initial_functions": 0}, "initial_functions must be an integer of at least 1, got 0"),
        ({"curriculum_fraction": 0.0}, r"curriculum_fraction must lie in \(0, 1\], got 0.0"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        InContextRegressionTask(**fields)
    assert "\n" not in str(error.value)
