"""Positional recall: keys that come several times, asked for one by one."""

from dataclasses import replace
from itertools import chain
from typing import Any

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import CHUNKED, SHARES, WHOLE, density_points, longer
from ovq.experiments.suites.recall import DENSE, PAPER_TASK, SSMAX, THIN
from ovq.experiments.variants import Sizes, all_variants, make_entries, paper_sizes
from ovq.tasks import PositionalRecallTask

NAME = "positional"
STEPS = {"demo": 2800, "quick": 300, "paper": 20_000}
# One of each kind that two cores have time for: the suite has twice the layers of recall.
MIXERS = ("full_attention_nope", "ovq", "gated_delta_net")
# It starts as basic recall, which the upper two layers learn by themselves. Once the pairs are
# thin, their keys begin to come more often, and the lower two learn to count them; contexts
# sixteen times as long teach them at last to do so among more filler.
BEGUN, COUNTED, SHORT = 0.4, 0.6, 0.7
STAGES = {
    "initial_tokens_per_pair": 2,
    "curriculum_fraction": BEGUN,
    "initial_occurrences": 1,
    "occurrences_fraction": COUNTED,
}


def sizes(scale: Scale) -> Sizes:
    """What is trained: four layers, since a pair must be told from earlier ones of its key."""
    if scale.name == "paper":
        task = PositionalRecallTask(**PAPER_TASK, **STAGES)
        return replace(
            paper_sizes(task, num_steps=STEPS[scale.name]),
            model={"num_identity_layers": 4, "ssmax_length": task.context_length},
            training=_stages(short_length=4096),
        )
    return Sizes(
        task=PositionalRecallTask(
            context_length=2048,
            tokens_per_pair=DENSE,
            num_queries=256,
            num_keys=1024,
            num_values=16,
            num_filler=16,
            max_occurrences=4,
            **STAGES,
        ),
        num_layers=4,
        num_steps=STEPS[scale.name],
        batch_size=2,
        window_size=16,
        # A slot a token and long chunks: with half of them in training OVQ learns to count badly,
        # however many it has in the end.
        num_centroids=2048,
        chunk_size=64,
        model=SSMAX | {"num_identity_layers": 2},
        training=_stages(short_length=128),
    )


def _stages(short_length: int) -> dict[str, Any]:
    """Fields of the training that go with the stages of the task."""
    return {
        "identity_fraction": BEGUN,
        "short_length": short_length,
        "short_fraction": SHORT,
    }


def positional(scale: Scale) -> Experiment:
    """Recall of the n-th value of a key against length, by ordinal."""
    trained = sizes(scale)
    start, most = trained.task.context_length, DENSE * 1024
    variants = all_variants(trained)
    settings = (*SHARES, *CHUNKED, WHOLE)
    points = chain(
        density_points(scale, longer(start, scale), THIN, settings),
        density_points(scale, longer(start, scale, longest=most), DENSE, settings),
    )
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="Can the n-th value of a key be recalled, or only one of its values?",
        entries=make_entries(
            NAME, scale, trained, {name: variants[name] for name in MIXERS}, points
        ),
        learning_rates=scale.learning_rates,
        seeds=scale.seeds,
    )
