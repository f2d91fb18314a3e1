"""What the recall task promises about its sequences."""

import dataclasses
import hashlib

import pytest
import torch

from ovq.tasks import IGNORED, RecallTask, Split, TaskDataset

TASKS = {
    "default": RecallTask(),
    "long keys and values": RecallTask(
        context_length=100, tokens_per_pair=10, key_length=3, value_length=2, num_keys=4
    ),
    "many possible keys": RecallTask(key_length=9, tokens_per_pair=16, num_keys=1000),
    "no filler": RecallTask(context_length=32, tokens_per_pair=2, num_queries=16, num_keys=16),
    "uneven": RecallTask(context_length=61, tokens_per_pair=7, num_queries=1),
    "curriculum": RecallTask(initial_tokens_per_pair=2),
    "fixed pairs": RecallTask(context_length=200, fixed_pairs=9, initial_tokens_per_pair=4),
}


@pytest.fixture(params=TASKS)
def task(request):
    return TASKS[request.param]


def examples(task, split=Split.TRAIN, num_sequences=10, progress=1.0):
    for seed in range(num_sequences):
        generator = torch.Generator().manual_seed(seed)
        yield task.example(generator, split=split, progress=progress)


def names_of(task, input_ids):
    """The letters of the tokens' names, such as ``ffkvf?kv``."""
    return "".join(name[0] for name in task.decode(input_ids).split())


def pairs_of(task, input_ids):
    """Key and value of every pair of the context, read token by token."""
    names = task.decode(input_ids[: task.context_length]).split()
    pairs, index = [], 0
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
        pairs.append((key, value))
    return pairs


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_context_holds_unique_contiguous_pairs_at_the_stated_density(task, progress):
    for example in examples(task, progress=progress):
        pairs = pairs_of(task, example["input_ids"])
        assert len(pairs) == len(dict(pairs)) == task.num_pairs_at(progress)


def test_queries_ask_for_different_pairs_and_labels_stand_at_the_answers_only(task):
    for example in examples(task):
        input_ids, labels = example["input_ids"], example["labels"]
        block = "k" * task.key_length + "v" * task.value_length
        assert names_of(task, input_ids[task.context_length :]) == "?" + block * task.num_queries
        start = task.context_length + 1
        expected = ["." if name == "k" else "v" for name in block] * task.num_queries
        assert (labels[:start] == IGNORED).all()
        assert ["." if label == IGNORED else "v" for label in labels[start:]] == expected
        names = task.decode(input_ids[start:]).split()
        asked = [tuple(names[i : i + len(block)]) for i in range(0, len(names), len(block))]
        pairs = [key + value for key, value in pairs_of(task, input_ids)]
        assert len(set(asked)) == task.num_queries
        assert set(asked) <= set(pairs)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_solver_is_always_right_and_reads_no_answer(task, split, progress):
    for example in examples(task, split, progress=progress):
        input_ids, labels = example["input_ids"].clone(), example["labels"]
        input_ids[labels != IGNORED] = 0
        assert torch.equal(task.solve(input_ids), labels)


@pytest.mark.parametrize("split", Split)
def test_parity_of_the_context_separates_the_splits(task, split):
    for length in (task.context_length, 2 * task.context_length - 4):
        longer = dataclasses.replace(task, context_length=length, num_queries=1, num_keys=1000)
        for progress in (0.0, 1.0):
            for example in examples(longer, split, progress=progress):
                parity = int(example["input_ids"][:length].sum()) % 2
                assert parity == (split is Split.EVALUATE)


def test_both_splits_are_uniform():
    """Every sequence of a split comes equally often."""
    task = RecallTask(
        context_length=3, tokens_per_pair=3, num_queries=1, num_keys=1, num_values=2, num_filler=2
    )
    for split in Split:
        counts: dict[str, int] = {}
        for example in examples(task, split, num_sequences=800):
            text = task.decode(example["input_ids"])
            counts[text] = counts.get(text, 0) + 1
        # 2 placements x 2 values x 2 filler tokens, half of them in each split
        assert len(counts) == 4
        assert all(abs(count - 200) < 60 for count in counts.values()), counts


def test_placements_are_uniform():
    task = RecallTask(context_length=6, tokens_per_pair=3, num_queries=1)
    counts: dict[str, int] = {}
    for example in examples(task, num_sequences=600):
        names = names_of(task, example["input_ids"][:6])
        counts[names] = counts.get(names, 0) + 1
    assert len(counts) == 6  # 2 pairs and 2 filler tokens in any order
    assert all(abs(count - 100) < 40 for count in counts.values()), counts


def test_one_context_token_in_eight_bears_an_answer():
    task = RecallTask()
    for length in (128, 2048):
        (example,) = examples(task.with_length(length), num_sequences=1)
        assert names_of(task, example["input_ids"][:length]).count("v") == length // 8


def test_curriculum_thins_the_pairs_and_then_keeps_them():
    task = RecallTask(initial_tokens_per_pair=2, curriculum_fraction=0.5)
    assert task.num_pairs_at(0.0) == 64
    assert task.num_pairs_at(0.25) == 128 // 5
    assert [task.num_pairs_at(progress) for progress in (0.5, 0.8, 1.0)] == [16, 16, 16]
    pairs = [task.num_pairs_at(step / 100) for step in range(101)]
    assert pairs == sorted(pairs, reverse=True)
    assert task.without_curriculum().num_pairs_at(0.0) == 16
    assert RecallTask().num_pairs_at(0.0) == 16
    dataset = TaskDataset(task, num_sequences=4, seed=0, split=Split.TRAIN, curriculum=True)
    drawn = [len(pairs_of(task, example["input_ids"])) for example in dataset]
    assert drawn == [64, 128 // 5, 16, 16]


def test_chance_levels():
    task = RecallTask(context_length=64, num_values=4, num_queries=1)
    right = {"value": 0, "pair": 0}
    for example in examples(task, num_sequences=400):
        answer = example["input_ids"][-1]
        right["value"] += int(answer == task.encode("v0")[0])
        first_pair = task.encode(pairs_of(task, example["input_ids"])[0][1][0])[0]
        right["pair"] += int(answer == first_pair)
    assert task.chance == 0.25
    assert right["value"] / 400 == pytest.approx(task.chance, abs=0.05)
    assert right["pair"] / 400 == pytest.approx(task.context_chance, abs=0.05)


def test_every_id_has_a_name(task):
    ids = torch.arange(task.vocab_size)
    assert torch.equal(task.encode(task.decode(ids)), ids)
    assert task.decode([0, 1, 2]) == "<pad> ? k0"


@pytest.mark.parametrize("name", ["x9", "k256", "v64", "f64", "k01", "k", "K1", "k-1", "k٣", "??"])
def test_unknown_names_raise(name):
    with pytest.raises(ValueError, match="text must hold only the token names") as error:
        RecallTask().encode(f"f1 k2 {name} ?")
    message = str(error.value)
    assert message.startswith(
        "text must hold only the token names k0 to k255, v0 to v63, f0 to f63"
    )
    assert message.endswith(f"got {name!r}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_length": 0}, "key_length must be an integer of at least 1, got 0"),
        ({"num_queries": 17}, "num_queries must be at most the 16 pairs .*, got 17"),
        ({"num_values": 7}, "num_values must be even, got 7"),
        ({"num_filler": 1}, "num_filler must be even, got 1"),
        ({"tokens_per_pair": 1}, "tokens_per_pair must be at least .*= 2, got 1"),
        ({"context_length": 7}, "context_length must be at least tokens_per_pair = 8, got 7"),
        ({"num_keys": 15}, "num_keys .* the 16 pairs .*, got 15"),
        ({"num_keys": 63, "initial_tokens_per_pair": 2}, "num_keys .* the 64 pairs .*, got 63"),
        ({"num_keys": 3, "key_length": 2}, "num_keys .* the 16 pairs .*, got 9"),
        ({"initial_tokens_per_pair": 1}, "initial_tokens_per_pair must be .* at least 2, got 1"),
        ({"initial_tokens_per_pair": 9}, "initial_tokens_per_pair must be at most .*= 8, got 9"),
        ({"curriculum_fraction": 0.0}, r"curriculum_fraction must lie in \(0, 1\], got 0.0"),
    ],
)
def test_bad_fields_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(**fields)


def test_too_few_keys_for_another_length_raise():
    task = RecallTask(num_keys=64, initial_tokens_per_pair=2)
    with pytest.raises(ValueError, match=r"num_keys .* the 1024 pairs .* 2048 tokens, got 64"):
        task.with_length(2048)
    with pytest.raises(ValueError, match=r"num_keys .* the 256 pairs .* 2048 tokens, got 64"):
        task.without_curriculum().with_length(2048)
    assert task.without_curriculum().with_length(512).num_pairs == 64


def test_pairs_or_filler_grow_with_the_length():
    task = RecallTask(initial_tokens_per_pair=4)
    assert task.with_length(1024).num_pairs == 128
    fixed = task.with_pairs_fixed()
    assert fixed.num_pairs == task.num_pairs == 16
    longer = fixed.with_length(1024)
    assert [longer.num_pairs_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == [
        256,
        30,
        16,
        16,
    ]
    (example,) = examples(longer, num_sequences=1)
    assert len(pairs_of(longer, example["input_ids"])) == 16
    # The pairs are spread over the whole of it.
    places = longer.vocabulary.contains("k", example["input_ids"][:1024]).nonzero()[:, 0]
    assert places.min() < 256
    assert places.max() > 768


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fixed_pairs": 0}, "fixed_pairs must be an integer of at least 1, got 0"),
        ({"fixed_pairs": 65}, "fixed_pairs must be at most the 64 pairs .* 128 tokens, got 65"),
        ({"fixed_pairs": 7}, "num_queries must be at most the 7 pairs of 128 tokens, got 8"),
        (
            {"fixed_pairs": 32, "initial_tokens_per_pair": 5},
            "initial_tokens_per_pair must be at most context_length / fixed_pairs = 4, got 5",
        ),
    ],
)
def test_bad_numbers_of_pairs_raise(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        RecallTask(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.plain
@pytest.mark.parametrize("name", ["num_keys", "context_length", "tokens_per_pair"])
@pytest.mark.parametrize("value", [None, "8", 8.0])
def test_fields_of_another_type_raise(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
        RecallTask(**{name: value})


# Of four examples of seed 5 in training and in evaluation, as the committed runs saw them.
DIGESTS = {
    "default": ("9eb1a8ac7b302ddd", "993b7aa70785fe78"),
    "long keys and values": ("0747b72b8b0df51e", "313592a83487d738"),
    "many possible keys": ("4323bd8caceac7db", "58d53229c6137f0a"),
    "no filler": ("b098ea2a8221d161", "5f7d324d0fec1696"),
    "uneven": ("e000b6c1624cb43e", "22e5a99c49a59a35"),
    "curriculum": ("f2a38cea18b45fee", "8a6e0074210e82f8"),
}


@pytest.mark.parametrize("name", DIGESTS)
def test_data_of_a_seed_stays_what_it_was(name):
    """Else the committed results could not be made again."""
    for split, digest in zip(Split, DIGESTS[name], strict=True):
        dataset = TaskDataset(TASKS[name], num_sequences=4, seed=5, split=split, curriculum=True)
        content = "".join(str(tensor.tolist()) for i in range(4) for tensor in dataset[i].values())
        assert hashlib.sha256(content.encode()).hexdigest()[:16] == digest
