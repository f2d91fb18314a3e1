"""Forgetting: pairs A, then more and more of something else, at equal bytes of state."""

from collections.abc import Iterator

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.variants import (
    LONG_MEMORY,
    Sizes,
    Variant,
    all_variants,
    make_entries,
    paper_sizes,
)
from ovq.points import Point, num_centroids_holding, state_bytes
from ovq.run_config import model_config
from ovq.tasks import ForgettingTask

NAME = "forgetting"
STEPS = {"demo": 1600, "quick": 600, "paper": 20_000}
TIMES = (0, 1, 2, 4, 8, 16)  # n, in lengths of A
DENSE_STATES = ("linear_attention", "gated_delta_net", "mamba2")


def sizes(scale: Scale) -> Sizes:
    """What is trained: A, and as much of B."""
    if scale.name == "paper":
        return paper_sizes(
            _task(first_length=1024, context_length=16_384, num_keys=8192, num_queries=64),
            num_steps=STEPS[scale.name],
            window_size=16,
        )
    return Sizes(
        task=_task(first_length=64, context_length=128, num_keys=256, num_queries=8),
        num_layers=2,
        num_steps=STEPS[scale.name],
        batch_size=32,
        window_size=16,
        num_centroids=64,
    )


def _task(
    *, first_length: int, context_length: int, num_keys: int, num_queries: int
) -> ForgettingTask:
    return ForgettingTask(
        first_length=first_length,
        context_length=context_length,
        tokens_per_pair=8,
        later_tokens_per_pair=8,
        num_keys=num_keys,
        num_later_keys=num_keys,
        num_values=16,
        num_filler=16,
        num_later_filler=16,
        num_queries=num_queries,
        initial_tokens_per_pair=2,
        curriculum_fraction=0.7,
    )


def variants_of(scale: Scale, sizes: Sizes) -> dict[str, Variant]:
    """Full attention, dictionaries, and dense states of about their bytes.

    The dense ones are wider than in other suites. How much is still to come nobody knows here, so
    that growth cannot keep step with it: it is the paper's for both dictionaries, as the seeds are.
    Ours reads centroids at unit norm, which what joins them later turns but cannot shorten.
    """
    known = all_variants(sizes)
    unit = sizes.papers_dictionary() | {"centroid": "unit"}
    return {
        "full_attention_nope": known["full_attention_nope"],
        "ovq": Variant(mixer="ovq", model={"dictionary": unit}),
        "ovq_paper": known["ovq_paper"],
        "linear_attention": Variant(mixer="linear_attention", model={"head_dim": 96}),
        "gated_delta_net": Variant(mixer="gated_delta_net", model={"expand_v": 2.0, **LONG_MEMORY}),
        "mamba2": known["mamba2"],
    }


def slots_of_equal_bytes(scale: Scale, sizes: Sizes) -> int:
    """As many slots as the smallest of the dense states has room for."""
    variants = variants_of(scale, sizes)
    entries = {e.name: e.config for e in make_entries(NAME, scale, sizes, variants, [], variants)}
    shapes = {name: model_config(sizes.task, config.model) for name, config in entries.items()}
    tokens = sizes.task.sequence_length  # more than a window, after which these states stand still
    smallest = min(state_bytes(shapes[name], tokens) for name in DENSE_STATES)
    return num_centroids_holding(float(smallest), shapes["ovq"], tokens)


def time_points(scale: Scale, task: ForgettingTask, setting: str) -> Iterator[Point]:
    """The same questions about A after n = 0 to 16 times its length."""
    for times in TIMES:
        length = task.first_length * (1 + times)
        if length > scale.longest:
            continue
        yield Point(
            length=length,
            setting=setting,
            num_sequences=max(2, 2 * scale.num_answers // task.num_queries),
        )


def forgetting(scale: Scale) -> Experiment:
    """Score on A against the tokens since, for sparse and dense updates."""
    trained = sizes(scale)
    task = trained.task
    assert isinstance(task, ForgettingTask)
    slots = str(slots_of_equal_bytes(scale, trained))
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="Do sparse updates forget less than dense ones, at equal bytes of state?",
        entries=make_entries(
            NAME, scale, trained, variants_of(scale, trained), time_points(scale, task, slots)
        ),
        learning_rates=scale.learning_rates,
        seeds=scale.seeds,
    )
