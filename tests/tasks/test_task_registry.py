"""The contract of every task in the registry."""

import doctest
import importlib
import pickle

import pytest
import torch

from ovq.tasks import (
    IGNORED,
    TASKS,
    LanguageModelingTask,
    RecallTask,
    Split,
    TaskDataset,
    task_from_dict,
    task_to_dict,
)

TEXT = " ".join(f"In the beginning were {number} hats, naïvely." for number in range(100))
MODULES = ["base", "recall", "corpus", "tokenization", "language_modeling", "registry"]


@pytest.fixture(params=sorted(TASKS))
def task(request, tmp_path):
    if request.param == "language_modeling":
        (tmp_path / "hats.txt").write_text(TEXT, encoding="utf-8")
        return LanguageModelingTask(context_length=48, source=str(tmp_path))
    return TASKS[request.param](context_length=64)


def draw(task, seed=0, split=Split.TRAIN, progress=1.0):
    return task.example(torch.Generator().manual_seed(seed), split=split, progress=progress)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 0.4, 1.0])
def test_example_has_the_stated_form(task, split, progress):
    example = draw(task, split=split, progress=progress)
    assert set(example) == {"input_ids", "labels"}
    for tensor in example.values():
        assert tensor.shape == (task.sequence_length,)
        assert tensor.dtype == torch.int64
    input_ids, labels = example["input_ids"], example["labels"]
    assert int(input_ids.min()) >= 0
    assert int(input_ids.max()) < task.vocab_size
    assert torch.equal(labels[labels != IGNORED], input_ids[labels != IGNORED])
    assert (labels != IGNORED).any()


def test_generator_alone_fixes_the_example(task):
    first = draw(task, seed=7)
    torch.manual_seed(123)
    again = draw(pickle.loads(pickle.dumps(task)), seed=7)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], draw(task, seed=8)["input_ids"])


def test_global_generator_is_left_alone(task):
    before = torch.get_rng_state()
    draw(task)
    assert torch.equal(before, torch.get_rng_state())


def test_splits_never_share_a_sequence(task):
    rows = {
        split: {tuple(draw(task, seed, split)["input_ids"].tolist()) for seed in range(200)}
        for split in Split
    }
    assert not rows[Split.TRAIN] & rows[Split.EVALUATE]


def test_with_length(task):
    longer = task.with_length(2 * task.context_length)
    assert longer.context_length == 2 * task.context_length
    assert longer.sequence_length - longer.context_length == (
        task.sequence_length - task.context_length
    )
    assert draw(longer)["input_ids"].shape == (longer.sequence_length,)
    assert task.with_length(task.context_length) == task
    assert task.without_curriculum().with_length(96).context_length == 96


def test_text_round_trip(task):
    input_ids = task.encode("f12 k3 v5 ?")
    assert input_ids.dtype == torch.int64
    assert task.decode(input_ids) == "f12 k3 v5 ?"
    assert task.decode(input_ids.tolist()) == "f12 k3 v5 ?"
    assert task.encode("").shape == (0,)
    assert task.decode([]) == ""


@pytest.mark.parametrize("number", [-1, 10**6])
def test_decode_rejects_ids_outside_the_vocabulary(task, number):
    with pytest.raises(
        ValueError, match=rf"ids must lie in \[0, {task.vocab_size}\), got {number}"
    ):
        task.decode([1, number])


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
    fields = task_to_dict(task)
    assert task_from_dict(fields) == task
    assert type(task_from_dict({"name": fields["name"]})) is type(task)
    with pytest.raises(ValueError, match=r"must be among .*'context_length'.*got 'depth'"):
        task_from_dict({**fields, "depth": 3})


@pytest.mark.parametrize("name", ["recal", None, ["recall"]])
def test_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=r"\['language_modeling', 'recall'\], got"):
        task_from_dict({"name": name})


def test_unregistered_task_raises():
    class Unregistered(RecallTask):
        pass

    with pytest.raises(ValueError, match=r"task must be one of .*got a Unregistered"):
        task_to_dict(Unregistered())


def test_dataset_items_depend_on_seed_split_and_index_alone(task):
    def dataset(seed, split, num_sequences=6):
        return TaskDataset(task, num_sequences=num_sequences, seed=seed, split=split)

    train = dataset(0, Split.TRAIN)
    backwards = [train[index]["input_ids"] for index in reversed(range(6))][::-1]
    batch = dataset(0, Split.TRAIN, num_sequences=100).batch(range(6))
    assert torch.equal(batch["input_ids"], torch.stack(backwards))
    assert batch["labels"].shape == (6, task.sequence_length)
    others = [dataset(1, Split.TRAIN)[2], dataset(0, Split.EVALUATE)[2], train[3]]
    assert not any(torch.equal(train[2]["input_ids"], other["input_ids"]) for other in others)
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


@pytest.mark.parametrize("num_sequences", [0, -1, 2**32])
def test_dataset_size_out_of_range_raises(num_sequences):
    with pytest.raises(ValueError, match=f"num_sequences must be .*got {num_sequences}"):
        TaskDataset(RecallTask(), num_sequences=num_sequences, seed=0, split=Split.TRAIN)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    assert doctest.testmod(importlib.import_module(f"ovq.tasks.{module}")).failed == 0
