"""What the forgetting task promises about its sequences."""

import pytest
import torch

from ovq.tasks import IGNORED, ForgettingTask, Split

TASKS = {
    "default": ForgettingTask(),
    "long keys and values": ForgettingTask(
        first_length=60,
        context_length=200,
        tokens_per_pair=10,
        later_tokens_per_pair=7,
        key_length=2,
        value_length=2,
        num_keys=4,
        num_later_keys=9,
        num_queries=3,
    ),
    "no filler": ForgettingTask(tokens_per_pair=2, later_tokens_per_pair=2),
    "nothing later": ForgettingTask(context_length=128),
    "few later": ForgettingTask(context_length=128 + 10),
    "less than a pair later": ForgettingTask(context_length=128 + 3),
    "curriculum": ForgettingTask(initial_tokens_per_pair=2),
    "fixed pairs": ForgettingTask(context_length=500, fixed_pairs=5),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def examples(task, split=Split.TRAIN, num_sequences=10, progress=1.0):
    for seed in range(num_sequences):
        generator = torch.Generator().manual_seed(seed)
        yield task.example(generator, split=split, progress=progress)


def pairs_of(task, ids, key_letter, filler_letter):
    """Key and value of every pair of a part, read token by token."""
    names, pairs, index = task.decode(ids).split(), [], 0
    while index < len(names):
        if names[index][0] == filler_letter:
            index += 1
            continue
        key = tuple(names[index : index + task.key_length])
        index += task.key_length
        value = tuple(names[index : index + task.value_length])
        index += task.value_length
        assert all(name[0] == key_letter for name in key)
        assert all(name[0] == "v" for name in value)
        pairs.append((key, value))
    return pairs


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_each_part_has_keys_filler_and_density_of_its_own(task, progress):
    for example in examples(task, progress=progress):
        context = example["input_ids"][: task.context_length]
        first = pairs_of(task, context[: task.first_length], "a", "f")
        later = pairs_of(task, context[task.first_length :], "b", "g")
        assert len(dict(first)) == len(first)
        assert len(dict(later)) == len(later)
        assert len(first) + len(later) == task.num_pairs_at(progress)
        if progress == 1.0:
            n = task.context_length - task.first_length
            assert len(first) == task.first_length // task.tokens_per_pair
            expected = n // task.later_tokens_per_pair
            assert len(later) == (expected if task.fixed_pairs is None else task.fixed_pairs)


def test_questions_are_about_both_parts_in_random_order(task):
    orders = set()
    for example in examples(task):
        context = example["input_ids"][: task.context_length]
        pairs = pairs_of(task, context[: task.first_length], "a", "f")
        pairs += pairs_of(task, context[task.first_length :], "b", "g")
        names = task.decode(example["input_ids"][task.context_length :]).split()
        width = task.key_length + task.value_length
        blocks = [tuple(names[i : i + width]) for i in range(1, len(names), width)]
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= {key + value for key, value in pairs}
        letters = "".join(block[0][0] for block in blocks)
        assert letters.count("a") == task.num_queries
        num_later = sum(key[0][0] == "b" for key, _ in pairs)
        assert letters.count("b") == min(task.num_queries, num_later)
        orders.add(letters)
        groups = task.groups(example)
        asked = example["labels"] != IGNORED
        assert groups["A"].sum() == task.num_queries * task.value_length
        assert ("B" in groups) == ("b" in letters)
        question = names[1 : width + 1]
        which = groups["A" if question[0][0] == "a" else "B"]
        answer = which[task.context_length + 1 + task.key_length : task.context_length + 1 + width]
        assert answer.all()
        assert torch.equal(sum(groups.values()).bool(), asked)
    assert len(orders) > 1 or "b" not in letters


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_solver_is_always_right_and_reads_no_answer(task, split, progress):
    for example in examples(task, split, progress=progress):
        input_ids, labels = example["input_ids"].clone(), example["labels"]
        input_ids[labels != IGNORED] = 0
        assert torch.equal(task.solve(input_ids), labels)
        parity = int(example["input_ids"][: task.context_length].sum()) % 2
        assert parity == (split is Split.EVALUATE)


def test_length_is_that_of_what_comes_later():
    task = ForgettingTask(first_length=64, context_length=128, num_later_keys=20_000)
    for factor in (0, 1, 4, 16):
        longer = task.with_length(64 + factor * 64)
        assert longer.parts()[0] == task.parts()[0]
        assert longer.num_pairs == 8 + factor * 16
        fixed = task.with_pairs_fixed()
        if factor:
            assert fixed.with_length(64 + factor * 64).num_pairs == 8 + 16
    assert task.with_length(64).sequence_length == 64 + 1 + 8 * 2
    assert task.with_length(65_536).sequence_length == 65_536 + 1 + 16 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_length": 127}, "context_length must be at least first_length = 128, got 127"),
        ({"first_length": 0}, "first_length must be an integer of at least 1, got 0"),
        ({"first_length": 7}, "first_length must be at least tokens_per_pair = 8, got 7"),
        ({"num_queries": 17}, "num_queries must be at most the 16 pairs of 128 tokens, got 17"),
        ({"later_tokens_per_pair": 1}, "later_tokens_per_pair must be at least .*= 2, got 1"),
        ({"num_later_keys": 31}, "num_later_keys .* at least 32, for the 32 pairs .*, got 31"),
        ({"num_keys": 15}, "num_keys .* at least 16, for the 16 pairs .* 128 tokens, got 15"),
        ({"num_later_filler": 3}, "num_later_filler must be even, got 3"),
        ({"fixed_pairs": 65}, "fixed_pairs must be at most the 64 pairs .* 128 tokens, got 65"),
        ({"initial_tokens_per_pair": 5}, "initial_tokens_per_pair must be at most .* = 4, got 5"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        ForgettingTask(**fields)
    assert "\n" not in str(error.value)
