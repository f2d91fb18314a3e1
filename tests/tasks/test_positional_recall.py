"""What positional recall promises about its sequences."""

from collections import Counter, defaultdict

import pytest
import torch

from ovq.tasks import IGNORED, PositionalRecallTask, Split

TASKS = {
    "default": PositionalRecallTask(),
    "long keys and values": PositionalRecallTask(
        context_length=200, tokens_per_pair=10, key_length=3, value_length=2, num_keys=4
    ),
    "no filler": PositionalRecallTask(
        context_length=64, tokens_per_pair=2, num_queries=32, num_keys=16, num_values=16
    ),
    "always thrice": PositionalRecallTask(
        context_length=120, tokens_per_pair=8, min_occurrences=3, max_occurrences=3
    ),
    "once": PositionalRecallTask(min_occurrences=1, max_occurrences=1),
    "uneven": PositionalRecallTask(context_length=61, tokens_per_pair=7, num_queries=1),
    "curriculum": PositionalRecallTask(initial_tokens_per_pair=2),
    "curriculum of times": PositionalRecallTask(initial_tokens_per_pair=2, initial_occurrences=1),
    "fixed pairs": PositionalRecallTask(context_length=300, fixed_pairs=17),
    "no key to spare": PositionalRecallTask(num_keys=3),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def examples(task, split=Split.TRAIN, num_sequences=10, progress=1.0):
    for seed in range(num_sequences):
        generator = torch.Generator().manual_seed(seed)
        yield task.example(generator, split=split, progress=progress)


def context_of(task, input_ids):
    """What stands between the first token and the query marker."""
    names = task.decode(input_ids).split()
    assert names[0] == "<s>"
    assert names.index("?") == 1 + task.context_length
    return input_ids[1 : 1 + task.context_length]


def values_by_key(task, input_ids):
    """The values of each key in the order of the context, read token by token."""
    names = task.decode(context_of(task, input_ids)).split()
    found, index = defaultdict(list), 0
    while index < len(names):
        if names[index][0] == "f":
            index += 1
            continue
        key = tuple(names[index : index + task.key_length])
        index += task.key_length
        value = tuple(names[index : index + task.value_length])
        index += task.value_length
        assert all(name[0] == "k" for name in key)
        assert all(name[0] == "v" for name in value)
        found[key].append(value)
    return found


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 0.2, 1.0])
def test_keys_come_so_many_times_with_other_values(task, split, progress):
    for example in examples(task, split, progress=progress):
        found = values_by_key(task, example["input_ids"])
        assert sum(map(len, found.values())) == task.num_pairs_at(progress)
        least, most = task.occurrences_at(progress)
        for values in found.values():
            assert least <= len(values) <= most
            assert len(set(values)) == len(values)


def test_times_grow_once_the_pairs_are_thin():
    task = PositionalRecallTask(
        min_occurrences=2, max_occurrences=8, initial_occurrences=1, occurrences_fraction=0.75
    )
    bounds = [task.occurrences_at(step / 64) for step in range(65)]
    assert bounds == sorted(bounds)
    assert bounds[0] == bounds[32] == (1, 1)
    assert bounds[40] == (1, 4)
    assert bounds[48] == bounds[-1] == (2, 8) == task.without_curriculum().occurrences_at(0.0)
    assert [most for _, most in dict.fromkeys(bounds)] == [*range(1, 9), 8]
    with pytest.raises(ValueError, match=r"initial_occurrences must be at most min_occ.* got 3"):
        PositionalRecallTask(min_occurrences=2, initial_occurrences=3)
    with pytest.raises(ValueError, match="initial_occurrences must be an integer of at least 1"):
        PositionalRecallTask(initial_occurrences=0)
    with pytest.raises(ValueError, match=r"occurrences_fraction must be above .* 0.5, got 0.5"):
        PositionalRecallTask(initial_occurrences=1, occurrences_fraction=0.5)
    with pytest.raises(ValueError, match=r"occurrences_fraction must lie in \(0, 1\], got 1.5"):
        PositionalRecallTask(occurrences_fraction=1.5)


def test_all_numbers_of_times_come_and_no_key_is_special():
    task = PositionalRecallTask(context_length=512, tokens_per_pair=4)
    times = Counter()
    for example in examples(task, num_sequences=40):
        times.update(map(len, values_by_key(task, example["input_ids"]).values()))
    total = sum(times.values())
    assert sorted(times) == list(range(2, 9))
    assert all(0.5 / 7 < count / total < 1.7 / 7 for count in times.values()), times


def test_values_are_uniform_and_the_last_token_differs_within_a_key():
    task = PositionalRecallTask(context_length=512, tokens_per_pair=2, num_values=16)
    counts = Counter()
    for example in examples(task, Split.EVALUATE, num_sequences=40):
        for values in values_by_key(task, example["input_ids"]).values():
            numbers = [int(value[0][1:]) for value in values]
            counts.update(numbers)
            assert len({number // 2 for number in numbers}) == len(numbers)
    total = sum(counts.values())
    assert len(counts) == 16
    assert all(abs(count / total - 1 / 16) < 0.012 for count in counts.values()), counts


def test_questions_name_key_and_time(task):
    for example in examples(task):
        input_ids, labels = example["input_ids"], example["labels"]
        found = values_by_key(task, input_ids)
        names = task.decode(input_ids[1 + task.context_length :]).split()
        assert names[0] == "?"
        asking = task.key_length + 1
        width = asking + task.value_length
        blocks = [names[i : i + width] for i in range(1, len(names), width)]
        assert len(blocks) == task.num_queries
        assert len({tuple(block[:asking]) for block in blocks}) == len(blocks)
        for block in blocks:
            ordinal, key = block[0], tuple(block[1:asking])
            assert ordinal[0] == "o"
            assert found[key][int(ordinal[1:])] == tuple(block[asking:])
        start = task.context_length + 2
        assert (labels[:start] == IGNORED).all()
        asked = (labels[start:] != IGNORED).view(-1, width)
        assert not asked[:, : task.key_length + 1].any()
        assert asked[:, task.key_length + 1 :].all()


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_solver_is_always_right_and_reads_no_answer(task, split, progress):
    for example in examples(task, split, progress=progress):
        input_ids, labels = example["input_ids"].clone(), example["labels"]
        input_ids[labels != IGNORED] = 0
        assert torch.equal(task.solve(input_ids), labels)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_parity_of_the_context_separates_the_splits(task, split, progress):
    for example in examples(task, split, progress=progress):
        parity = int(context_of(task, example["input_ids"]).sum()) % 2
        assert parity == (split is Split.EVALUATE)


def test_groups_are_the_times_asked_for():
    task = PositionalRecallTask(num_queries=16)
    for example in examples(task):
        groups = task.groups(example)
        assert set(groups) <= {f"o{time}" for time in range(8)}
        for name, places in groups.items():
            before = example["input_ids"][places.nonzero()[:, 0] - 2]
            assert set(task.decode(before).split()) == {name}


def test_context_chance_is_reached_by_any_value_of_the_key():
    task = PositionalRecallTask(context_length=256, num_queries=8)
    right = total = 0
    for example in examples(task, num_sequences=300):
        found = values_by_key(task, example["input_ids"])
        names = task.decode(example["input_ids"][task.context_length + 2 :]).split()
        for i in range(0, len(names), 3):
            right += found[(names[i + 1],)][0] == (names[i + 2],)
            total += 1
    assert right / total == pytest.approx(task.context_chance, abs=0.03)
    assert 0.15 < task.context_chance < 0.3


def test_pairs_or_filler_grow_with_the_length():
    task = PositionalRecallTask()
    assert task.with_length(4096).num_pairs == 512
    fixed = task.with_pairs_fixed().with_length(4096)
    assert fixed.num_pairs == 16
    (example,) = examples(fixed, num_sequences=1)
    assert sum(map(len, values_by_key(fixed, example["input_ids"]).values())) == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_occurrences": 0}, "min_occurrences must be an integer of at least 1, got 0"),
        ({"max_occurrences": 1}, "max_occurrences must be at least min_occurrences = 2, got 1"),
        ({"num_values": 14}, r"num_values .* at least 2 \* max_occurrences = 16, got 14"),
        (
            {"min_occurrences": 3, "max_occurrences": 3},
            "some number of keys has 16 pairs, got 3 and 3",
        ),
        (
            {"min_occurrences": 4, "max_occurrences": 4, "initial_tokens_per_pair": 4},
            "some number of keys has 17 pairs, got 4 and 4",
        ),
        ({"num_keys": 2}, "num_keys .* at least 3, for the 16 pairs .*, got 2"),
        ({"num_values": 65}, "num_values must be even, got 65"),
        ({"num_queries": 17}, "num_queries must be at most the 16 pairs .*, got 17"),
        ({"context_length": 8, "num_queries": 1}, "some number of keys has 1 pairs, got 2 and 8"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        PositionalRecallTask(**fields)
    assert "\n" not in str(error.value)
