"""The contract of every task in the registry."""

import doctest
import importlib
import json
import pickle
import pkgutil

import pytest
import torch

import ovq.tasks
from ovq.tasks import (
    IGNORED,
    TASKS,
    ContinuousTask,
    LanguageModelingTask,
    RecallTask,
    ShortFirst,
    Split,
    TaskDataset,
    TokenTask,
    task_from_dict,
    task_to_dict,
    token_task,
)

TEXT = " ".join(f"In the beginning were {number} hats, naïvely." for number in range(100))
# Of 64 places, in which all tasks have room for some questions, and of few values.
SMALL = {
    "recall": {"num_values": 4},
    "positional_recall": {"num_values": 4, "max_occurrences": 2, "min_occurrences": 1},
    "forgetting": {"num_values": 4, "first_length": 24, "num_queries": 3},
    "mqar": {"vocab_size": 32},
    "regression": {"num_functions": 4},
    "language_modeling": {},
}
ON_TOKENS = sorted(name for name, cls in TASKS.items() if issubclass(cls, TokenTask))
CONTINUOUS = sorted(name for name, cls in TASKS.items() if issubclass(cls, ContinuousTask))


def make(name, folder):
    fields = {"context_length": 64, **SMALL[name]}
    if name == "language_modeling":
        (folder / "hats.txt").write_text(TEXT, encoding="utf-8")
        fields["source"] = str(folder)
    return TASKS[name](**fields)


@pytest.fixture(params=sorted(TASKS))
def task(request, tmp_path):
    return make(request.param, tmp_path)


@pytest.fixture(params=ON_TOKENS)
def tokens(request, tmp_path):
    return make(request.param, tmp_path)


@pytest.fixture(params=CONTINUOUS)
def numbers(request, tmp_path):
    return make(request.param, tmp_path)


def draw(task, seed=0, split=Split.TRAIN, progress=1.0):
    return task.example(torch.Generator().manual_seed(seed), split=split, progress=progress)


def first_tensor(task, seed, split):
    return pickle.dumps(next(iter(draw(task, seed, split).values())).tolist())


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one
    )


def test_every_task_is_of_one_kind():
    assert sorted(ON_TOKENS + CONTINUOUS) == sorted(TASKS) == sorted(SMALL)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
def test_example_of_tokens_has_the_stated_form(tokens, split, progress):
    example = draw(tokens, split=split, progress=progress)
    assert set(example) == {"input_ids", "labels"}
    for tensor in example.values():
        assert tensor.shape == (tokens.sequence_length,)
        assert tensor.dtype == torch.int64
    input_ids, labels = example["input_ids"], example["labels"]
    assert int(input_ids.min()) >= 0
    assert int(input_ids.max()) < tokens.vocab_size
    asked = labels != IGNORED
    assert asked.any()
    assert int(labels[asked].min()) >= 0
    assert int(labels[asked].max()) < tokens.vocab_size
    if task_to_dict(tokens)["name"] != "mqar":  # which says so
        assert torch.equal(labels[asked], input_ids[asked])


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
def test_example_of_numbers_has_the_stated_form(numbers, split, progress):
    example = draw(numbers, split=split, progress=progress)
    assert set(example) == {"inputs", "targets"}
    inputs, targets = example["inputs"], example["targets"]
    assert inputs.shape == (numbers.sequence_length, numbers.num_inputs)
    assert targets.shape == (numbers.sequence_length, numbers.num_outputs)
    assert inputs.dtype == targets.dtype == torch.float32
    assert inputs.isfinite().all()
    assert torch.equal(targets.isnan().any(1), targets.isnan().all(1))
    assert targets[numbers.asked(example)].isfinite().all()
    assert numbers.asked(example).any()


def test_groups_share_out_what_is_asked(task):
    example = draw(task)
    asked, groups = task.asked(example), task.groups(example)
    assert asked.shape == (task.sequence_length,)
    assert asked.dtype == torch.bool
    if groups:
        assert torch.equal(torch.stack([*groups.values()]).sum(0), asked.long())


def test_generator_alone_fixes_the_example(task):
    first = draw(task, seed=7)
    torch.manual_seed(123)
    assert same(first, draw(pickle.loads(pickle.dumps(task)), seed=7))
    assert not same(first, draw(task, seed=8))


def test_global_generator_is_left_alone(task):
    before = torch.get_rng_state()
    draw(task)
    assert torch.equal(before, torch.get_rng_state())


def test_splits_never_share_a_sequence(task):
    rows = {split: {first_tensor(task, seed, split) for seed in range(200)} for split in Split}
    assert not rows[Split.TRAIN] & rows[Split.EVALUATE]


def test_an_oracle_is_always_right(tokens):
    """Reading no answer; language has no such oracle."""
    if isinstance(tokens, LanguageModelingTask):
        pytest.skip("no oracle")
    for split in Split:
        for seed in range(20):
            example = draw(tokens, seed, split)
            asked = tokens.asked(example)
            blanked = example["input_ids"].masked_fill(asked, 0)
            assert torch.equal(tokens.solve(blanked), example["labels"])


def test_guessing_reaches_chance(tokens):
    candidates = torch.arange(tokens.vocab_size)
    if hasattr(tokens, "vocabulary"):
        candidates = torch.arange(*tokens.vocabulary.bounds("v"))
    generator, right, total = torch.Generator().manual_seed(0), 0, 0
    for seed in range(300):
        labels = draw(tokens, seed)["labels"]
        answers = labels[labels != IGNORED]
        guesses = candidates[torch.randint(len(candidates), answers.shape, generator=generator)]
        right += int((guesses == answers).sum())
        total += len(answers)
    spread = (tokens.chance * (1 - tokens.chance) / total) ** 0.5
    assert abs(right / total - tokens.chance) < 4 * spread


def test_zeros_have_an_error_of_one(numbers):
    errors = [draw(numbers, seed)["targets"].square().nanmean() for seed in range(200)]
    assert float(torch.stack(errors).mean()) == pytest.approx(1.0, abs=0.06)


def test_with_length(task):
    longer = task.with_length(2 * task.context_length)
    assert longer.context_length == 2 * task.context_length
    assert longer.sequence_length - longer.context_length == (
        task.sequence_length - task.context_length
    )
    assert all(len(tensor) == longer.sequence_length for tensor in draw(longer).values())
    assert task.with_length(task.context_length) == task
    assert task.without_curriculum().with_length(96).context_length == 96


@pytest.mark.parametrize("name", ["recall", "positional_recall", "forgetting", "mqar"])
def test_pairs_or_filler_grow(name, tmp_path):
    task = make(name, tmp_path)
    more, longer = task.with_length(192), task.with_pairs_fixed().with_length(192)
    assert more.num_pairs > task.num_pairs == longer.num_pairs
    assert draw(longer)["input_ids"].shape == (longer.sequence_length,)
    assert task_from_dict(task_to_dict(longer)) == longer


def test_text_round_trip(tokens):
    for seed in range(3):
        ids = draw(tokens, seed)["input_ids"]
        text = tokens.decode(ids)
        if not isinstance(tokens, LanguageModelingTask):  # whose windows may cut a character
            assert torch.equal(tokens.encode(text), ids)
        assert tokens.decode(ids.tolist()) == text
    assert tokens.encode(text).dtype == torch.int64
    assert tokens.encode("").shape == (0,)
    assert tokens.decode([]) == ""


@pytest.mark.parametrize("number", [-1, 10**6])
def test_decode_rejects_ids_outside_the_vocabulary(tokens, number):
    with pytest.raises(
        ValueError, match=rf"ids must lie in \[0, {tokens.vocab_size}\), got {number}"
    ):
        tokens.decode([1, number])


@pytest.mark.parametrize("progress", [-0.1, 1.5])
def test_progress_outside_its_range_raises(task, progress):
    with pytest.raises(ValueError, match=f"progress must lie in .*got {progress}"):
        draw(task, progress=progress)


@pytest.mark.plain
@pytest.mark.parametrize("progress", ["1", None])
def test_progress_of_another_type_raises(task, progress):
    with pytest.raises(ValueError, match=r"progress must lie in \[0, 1\], got"):
        draw(task, progress=progress)


@pytest.mark.plain
@pytest.mark.parametrize("split", ["train", "evaluate", None, 0])
def test_a_split_that_is_none_raises(task, split):
    """A string would else draw from one of the halves without a word."""
    for wrong in (
        lambda: draw(task, split=split),
        lambda: TaskDataset(task, num_sequences=1, seed=0, split=split),
    ):
        with pytest.raises(ValueError, match=rf"split must be one of .*TRAIN.*, got {split!r}"):
            wrong()


@pytest.mark.plain
@pytest.mark.parametrize("seed", [None, "1", 0.5, True])
def test_a_seed_that_is_no_integer_raises(task, seed):
    with pytest.raises(ValueError, match=rf"seed must be an integer, got {seed!r}"):
        TaskDataset(task, num_sequences=1, seed=seed, split=Split.TRAIN)


@pytest.mark.parametrize("length", [0, -3, True])
def test_context_length_below_one_raises(task, length):
    with pytest.raises(ValueError, match=f"context_length must be .*got {length}"):
        task.with_length(length)


def test_dict_round_trip(task):
    fields = json.loads(json.dumps(task_to_dict(task)))
    assert task_from_dict(fields) == task
    assert type(task_from_dict({"name": fields["name"]})) is type(task)
    with pytest.raises(ValueError, match=r"must be among .*'context_length'.*got 'depth'"):
        task_from_dict({**fields, "depth": 3})


@pytest.mark.parametrize("name", ["recal", None, ["recall"]])
def test_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=r"\['forgetting', 'language_modeling', .*\], got"):
        task_from_dict({"name": name})


def test_unregistered_task_raises():
    class Unregistered(RecallTask):
        pass

    with pytest.raises(ValueError, match=r"task must be one of .*got a Unregistered"):
        task_to_dict(Unregistered())


def test_a_task_of_numbers_is_refused_where_tokens_are_needed(numbers):
    assert token_task(RecallTask()) == RecallTask()
    with pytest.raises(
        ValueError, match=f"task must be one on tokens, got {type(numbers).__name__}"
    ):
        token_task(numbers)


def test_dataset_items_depend_on_seed_split_and_index_alone(task):
    def dataset(seed, split, num_sequences=6):
        return TaskDataset(task, num_sequences=num_sequences, seed=seed, split=split)

    train = dataset(0, Split.TRAIN)
    backwards = [train[index] for index in reversed(range(6))][::-1]
    batch = dataset(0, Split.TRAIN, num_sequences=100).batch(range(6))
    assert same(batch, {name: torch.stack([each[name] for each in backwards]) for name in batch})
    assert all(tensor.shape[:2] == (6, task.sequence_length) for tensor in batch.values())
    others = [dataset(1, Split.TRAIN)[2], dataset(0, Split.EVALUATE)[2], train[3]]
    assert not any(same(train[2], other) for other in others)
    assert len(list(train)) == len(train) == 6
    with pytest.raises(IndexError):
        train[-1]


def test_dataset_generators_never_meet():
    seeds = [
        {TaskDataset(RecallTask(), num_sequences=500, seed=seed, split=split)._generator(index)
         .initial_seed() for index in range(500)}
        for seed in (0, 1)
        for split in Split
    ]  # fmt: skip
    assert [len(row) for row in seeds] == [500] * 4
    assert len(set.union(*seeds)) >= 4 * 500 - 4
    assert max(map(max, seeds)) < 2**32


def short_first(**changes):
    fields = {"num_sequences": 6, "num_short": 4, "short_length": 16, "seed": 0}
    task = RecallTask(context_length=64, num_queries=8, initial_tokens_per_pair=2)
    return ShortFirst(task, **(fields | {"split": Split.TRAIN, "curriculum": True} | changes))


def test_short_contexts_come_first_and_are_as_many_tokens():
    dataset = short_first()
    assert len(dataset) == 6
    lengths = [[len(example["input_ids"]) for example in item] for item in dataset]
    assert lengths == [[16 + 1 + 2 * 2] * 4] * 4 + [[64 + 1 + 2 * 8]] * 2
    short = TaskDataset(
        dataset.long.task.with_length(16), num_sequences=24, seed=0, split=Split.TRAIN,
        curriculum=True,
    )  # fmt: skip
    for number in range(16):
        found = dataset[number // 4][number % 4]
        assert all(found[name].equal(tensor) for name, tensor in short[number].items())


def test_no_two_sequences_of_any_length_are_drawn_alike():
    dataset = short_first(num_sequences=40, num_short=20)
    drawn = [dataset.short._generator(index).initial_seed() for index in range(4 * 20)]
    drawn += [dataset.long._generator(index).initial_seed() for index in range(4 * 20, 160, 4)]
    assert len(set(drawn)) == 4 * 20 + 20
    late = dataset[20][0]["input_ids"]
    assert late.equal(dataset.long[80]["input_ids"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_length": 24}, "short_length must divide context_length = 64, got 24"),
        ({"short_length": 0}, "short_length must be an integer of at least 1, got 0"),
        ({"short_length": 4}, "context_length must be at least tokens_per_pair = 8, got 4"),
        ({"num_short": 7}, r"num_short must lie in \[0, 6\], got 7"),
        ({"num_sequences": 0}, "num_sequences must be an integer of at least 1, got 0"),
    ],
)
def test_short_contexts_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        short_first(**fields)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_item_that_is_not_there_is_an_index_error(index):
    with pytest.raises(IndexError, match=rf"index must lie in \[0, 6\), got {index}"):
        short_first()[index]


def test_fewer_pairs_are_asked_for_in_shorter_contexts():
    task = RecallTask(context_length=128, tokens_per_pair=8, num_queries=16)
    assert [task.with_length(n).num_queries for n in (8, 64, 128, 1024)] == [1, 8, 16, 16]
    with pytest.raises(ValueError, match="context_length must be at least tokens_per_pair"):
        task.with_length(7)


@pytest.mark.parametrize("num_sequences", [0, -1, 2**32])
def test_dataset_size_out_of_range_raises(num_sequences):
    with pytest.raises(ValueError, match=f"num_sequences must be .*got {num_sequences}"):
        TaskDataset(RecallTask(), num_sequences=num_sequences, seed=0, split=Split.TRAIN)


@pytest.mark.parametrize("module", [info.name for info in pkgutil.iter_modules(ovq.tasks.__path__)])
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module(f"ovq.tasks.{module}")).failed == 0
