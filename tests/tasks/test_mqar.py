"""What MQAR promises about its sequences, the published generator's flaws among it."""

import pytest
import torch

from ovq.tasks import IGNORED, MQARTask, Split
from ovq.tasks.mqar import PUBLISHED

TASKS = {
    "default": MQARTask(),
    "full": MQARTask(context_length=64, fixed_pairs=16, vocab_size=64),
    "few": MQARTask(context_length=8, fixed_pairs=2, vocab_size=6),
    "one": MQARTask(context_length=4, fixed_pairs=1, vocab_size=4),
    "uniform": MQARTask(context_length=128, power_a=1.0),
    "curriculum": MQARTask(context_length=256, fixed_pairs=64, initial_pairs=4),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def examples(task, split=Split.TRAIN, num_sequences=20, progress=1.0):
    for seed in range(num_sequences):
        generator = torch.Generator().manual_seed(seed)
        yield task.example(generator, split=split, progress=progress)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 0.2, 1.0])
def test_pairs_come_first_and_every_key_is_asked_for_once(task, split, progress):
    for example in examples(task, split, progress=progress):
        ids, labels = example["input_ids"].tolist(), example["labels"].tolist()
        P, half = task.num_pairs_at(progress), task.vocab_size // 2
        keys, values = ids[0 : 2 * P : 2], ids[1 : 2 * P : 2]
        assert len(set(keys)) == len(set(values)) == P
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in values)
        # No filler is a key: what is a key is a question, at an even place, with its answer.
        asked = [place for place in range(2 * P, len(ids)) if ids[place] in keys]
        assert sorted(ids[place] for place in asked) == sorted(keys)
        assert all(place % 2 == 0 for place in asked)
        value_of = dict(zip(keys, values, strict=True))
        expected = {place + 1: value_of[ids[place]] for place in asked}
        assert {p: label for p, label in enumerate(labels) if label != IGNORED} == expected
        assert sum(ids) % 2 == (split is Split.EVALUATE)


def test_solver_is_always_right(task):
    for split in Split:
        for example in examples(task, split):
            assert torch.equal(task.solve(example["input_ids"]), example["labels"])


def test_filler_comes_from_the_generator_and_from_the_whole_vocabulary():
    task = MQARTask(context_length=256, vocab_size=64, fixed_pairs=4)
    torch.manual_seed(0)
    (first,) = examples(task, num_sequences=1)
    torch.manual_seed(1)
    (again,) = examples(task, num_sequences=1)
    assert torch.equal(first["input_ids"], again["input_ids"])
    counts = torch.zeros(64)
    for example in examples(task, num_sequences=100):
        counts += torch.bincount(example["input_ids"][8:], minlength=64)
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()


def test_gaps_follow_the_power_law():
    """The first key's gap is a draw from the law itself."""
    for power_a, expected in ((0.01, None), (1.0, 0.125)):
        task = MQARTask(context_length=68, fixed_pairs=2, power_a=power_a)
        space = 32
        law = torch.arange(1, space + 1).double() ** (power_a - 1)
        near = float(law[:4].sum() / law.sum())
        if expected is not None:
            assert near == pytest.approx(expected)
        hits = 0
        for example in examples(task, num_sequences=600):
            ids = example["input_ids"]
            place = int((ids[4:] == ids[0]).nonzero()[0, 0])
            hits += place // 2 < 4
        assert hits / 600 == pytest.approx(near, abs=0.07)


def test_chance_levels():
    task = MQARTask(context_length=32, fixed_pairs=8, vocab_size=32)
    right = {"value": 0, "pair": 0}
    for example in examples(task, num_sequences=200):
        answers = example["labels"][example["labels"] != IGNORED]
        right["value"] += int((answers == 16).sum())
        right["pair"] += int((answers == example["input_ids"][1]).sum())
    assert right["value"] / 1600 == pytest.approx(task.chance, abs=0.02)
    assert right["pair"] / 1600 == pytest.approx(task.context_chance)


def test_published_settings():
    assert PUBLISHED["zoology"] == ((64, 4), (128, 8), (256, 16), (512, 64))
    for settings in PUBLISHED.values():
        for length, num_pairs in settings:
            task = MQARTask(context_length=length, fixed_pairs=num_pairs)
            assert (task.vocab_size, task.power_a) == (8192, 0.01)
            assert task.num_pairs == num_pairs
            (example,) = examples(task, num_sequences=1)
            assert int((example["labels"] != IGNORED).sum()) == num_pairs


def test_pairs_or_filler_grow_with_the_length():
    task = MQARTask(context_length=64)
    assert [task.with_length(length).num_pairs for length in (64, 128, 256)] == [4, 8, 16]
    assert task.with_pairs_fixed().with_length(256).num_pairs == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_length": 63}, "context_length must be even, got 63"),
        ({"context_length": 14}, "context_length must be at least tokens_per_pair = 16, got 14"),
        ({"tokens_per_pair": 3}, "tokens_per_pair must be an integer of at least 4, got 3"),
        ({"fixed_pairs": 17}, "fixed_pairs must be at most context_length // 4 = 16, got 17"),
        ({"fixed_pairs": 0}, "fixed_pairs must be an integer of at least 1, got 0"),
        ({"vocab_size": 8}, "vocab_size must be at least 10, for 4 keys and values, got 8"),
        ({"vocab_size": 8191}, "vocab_size must be even, got 8191"),
        ({"power_a": 0.0}, "power_a must be finite and above 0, got 0.0"),
        ({"power_a": float("inf")}, "power_a must be finite and above 0, got inf"),
        ({"initial_pairs": 5}, "initial_pairs must be at most the 4 pairs .*, got 5"),
        ({"curriculum_fraction": 2.0}, r"curriculum_fraction must lie in \(0, 1\], got 2.0"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        MQARTask(**fields)
    assert "\n" not in str(error.value)
