"""What every suite plans: equal models, small windows, states of the sizes claimed, short runs."""

import json
from functools import cache

import pytest
import torch

from ovq.experiments import ALL, EXPERIMENTS, make_experiments, total_minutes
from ovq.experiments.suites import forgetting
from ovq.layers.registry import WITH_DICTIONARY
from ovq.points import dictionary_of, state_bytes
from ovq.run_config import RunConfig, model_class, model_config
from ovq.tasks import InContextRegressionTask

SCALES = {"demo": ("demo", False), "quick": ("demo", True), "paper": ("paper", False)}
# Of DESIGN: every one must be compared.
MIXERS = {
    "full_attention", "full_attention_nope", "sliding_window", "vq", "linear_attention", "mamba2",
    "gated_delta_net", "ovq",
}  # fmt: skip


@cache
def planned(scale):
    """All experiments of a scale, by name."""
    name, quick = SCALES[scale]
    return {experiment.name: experiment for experiment in make_experiments(ALL, name, quick=quick)}


def shape_of(entry):
    return model_config(entry.config.task, entry.config.model)


def num_parameters(entry):
    with torch.device("meta"):
        return model_class(entry.config.task)(shape_of(entry)).num_parameters()


@pytest.fixture(params=[(scale, name) for scale in SCALES for name in EXPERIMENTS], ids="-".join)
def experiment(request):
    scale, name = request.param
    return planned(scale)[name]


def test_the_models_of_a_suite_are_equal_in_parameters(experiment):
    by_width = {}
    for entry in experiment.entries:
        by_width.setdefault(entry.config.model["hidden_size"], []).append(num_parameters(entry))
    for numbers in by_width.values():
        assert max(numbers) <= 1.02 * min(numbers)


def test_windows_and_chunks_see_an_eighth_of_the_context_at_most(experiment):
    for entry in experiment.entries:
        shape, context = shape_of(entry), entry.config.task.context_length
        dictionary = shape.dictionary
        assert shape.window_size <= context // 8
        assert dictionary["chunk_size"] + dictionary["window_size"] <= context // 8
        assert 2 * shape.block_size <= context // 8


def test_configurations_and_points_are_plain_and_whole(experiment):
    for entry in experiment.entries:
        plain = json.loads(json.dumps(entry.config.to_dict()))
        assert RunConfig.from_dict(plain) == entry.config
        assert entry.points
        for point in entry.points:
            task = point.task_of(entry.config.task)
            assert task.context_length == point.length
            assert json.loads(json.dumps(dict(point.changes))) == point.changes


def test_shares_of_bytes_are_the_most_slots_within_them(experiment):
    for entry in experiment.entries[:5]:
        shape = shape_of(entry)
        if WITH_DICTIONARY.isdisjoint(shape.mixer_names):
            assert all(point.setting is None for point in entry.points)
            continue
        full = ["full_attention" if x in WITH_DICTIONARY else x for x in shape.layer_pattern]
        for point in entry.points:
            share, percent, _ = (point.setting or "").partition("%")
            if not percent:
                continue
            task = point.task_of(entry.config.task)
            fields, T = dictionary_of(point.setting, shape, task), task.sequence_length
            number, chunked = fields["num_centroids"], shape.dictionary | fields
            whole = state_bytes(shape, T, layer_pattern=full, use_short_conv=False)
            held = [
                state_bytes(shape, T, dictionary=chunked | {"num_centroids": n})
                for n in (number, number + 1)
            ]
            assert held[0] <= float(share) / 100 * whole < held[1]
            assert chunked["chunk_size"] <= point.length // 8


@pytest.mark.parametrize("scale", ["demo", "quick"])
def test_no_run_takes_twenty_minutes_by_its_own_estimate(scale):
    for experiment in planned(scale).values():
        for entry in experiment.entries:
            assert 0 < entry.training_minutes + entry.evaluation_minutes < 20, entry.name


@pytest.mark.parametrize(("scale", "limit"), [("demo", 13 * 60), ("quick", 30)])
def test_all_suites_together_stay_within_their_time(scale, limit):
    assert 0 < total_minutes(planned(scale).values()) <= limit


def test_what_suites_share_is_trained_once():
    suites = planned("demo")
    ablations, recall = suites["ablations"], suites["recall"]
    together = total_minutes([recall, ablations])
    alone = total_minutes([recall]) + total_minutes([ablations])
    shared = {entry.name: entry for entry in ablations.entries if entry.suite == "recall"}
    trained = sum(entry.training_minutes * ablations.runs_an_entry for entry in shared.values())
    assert alone - together == pytest.approx(trained)
    for entry in recall.entries:
        if entry.name in shared:
            assert entry.config == shared[entry.name].config


@pytest.mark.parametrize("name", ["recall", "positional"])
def test_recall_is_measured_to_65536_tokens_with_both_shares_of_the_state(name):
    for entry in planned("demo")[name].entries:
        last = [p for p in entry.points if p.length == 65_536]
        tasks = [point.task_of(entry.config.task) for point in last]
        assert {task.num_pairs for task in tasks} == {2048}
        has_dictionary = not WITH_DICTIONARY.isdisjoint(shape_of(entry).mixer_names)
        settings = {"10%", "25%", "10%:T/128", "25%:T/128"}
        if name == "recall":
            settings |= {"10%:T/128:kept", "25%:T/128:kept"}
        assert {p.setting for p in last} == (settings if has_dictionary else {None})
        assert min(point.length for point in entry.points) == entry.config.task.context_length


@pytest.mark.parametrize("name", ["positional", "regression", "mqar", "capacity", "ablations"])
def test_a_slot_a_token_is_measured_too_where_it_is_not_dear(name):
    for entry in planned("demo")[name].entries:
        if "ovq" not in shape_of(entry).mixer_names:
            continue
        settings = {point.setting for point in entry.points if point.length <= 8192}
        assert "T/1" in settings
        assert not any(p.setting == "T/1" and p.length > 8192 for p in entry.points)


def test_all_seeds_rates_and_mixers_are_there():
    for name, experiment in planned("demo").items():
        assert len(experiment.seeds) >= 3
        assert len(experiment.learning_rates) >= (1 if name == "ablations" else 2)
    compared = {
        mixer
        for entry in planned("demo")["recall"].entries
        for mixer in shape_of(entry).mixer_names
    }
    assert compared >= MIXERS


def test_regression_asks_about_every_number_of_functions():
    for entry in planned("demo")["regression"].entries:
        tasks = [point.task_of(entry.config.task) for point in entry.points]
        assert {task.num_functions for task in tasks} == {1, 8, 32, 128}
        assert all(isinstance(task, InContextRegressionTask) for task in tasks)
        assert all(task.num_examples >= 8 * task.num_functions for task in tasks)


@pytest.mark.parametrize("scale", ["demo", "paper"])
def test_forgetting_compares_equal_bytes(scale):
    entries = {entry.name: entry for entry in planned(scale)["forgetting"].entries}
    dense = min(state_bytes(shape_of(entries[name]), 100) for name in forgetting.DENSE_STATES)
    for name in ("ovq", "ovq_paper"):
        (setting,) = {point.setting for point in entries[name].points}
        shape = shape_of(entries[name])
        changed = shape.dictionary | {"num_centroids": int(setting)}
        held = state_bytes(shape, 10_000, dictionary=changed)
        assert 0.95 * dense <= held <= dense


def test_the_papers_scale_is_of_its_size():
    sizes = [num_parameters(entry) for e in planned("paper").values() for entry in e.entries]
    assert min(sizes) > 65e6
    assert max(sizes) < 490e6
    assert max(sizes) > 460e6
    for experiment in planned("paper").values():
        assert {entry.config.task.context_length for entry in experiment.entries} == {16_384}


@pytest.mark.plain
def test_unknown_names():
    with pytest.raises(ValueError, match=r"SUITE must be one of recall, .*, all, got 'recal'"):
        make_experiments("recal")
    with pytest.raises(ValueError, match="--scale must be one of demo, paper, got 'large'"):
        make_experiments("recall", "large")
    with pytest.raises(ValueError, match="--quick must go with --scale demo"):
        make_experiments("recall", "paper", quick=True)
