"""Positional recall: keys that come several times, asked for one by one."""

from itertools import chain

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import CHUNKED, SHARES, density_points, longer
from ovq.experiments.suites.recall import DENSE, THIN
from ovq.experiments.variants import Sizes, all_variants, make_entries, paper_sizes
from ovq.tasks import PositionalRecallTask

NAME = "positional"
STEPS = {"demo": 3600, "quick": 300, "paper": 20_000}
# One of each kind that two cores have time for: the suite has twice the layers of recall.
MIXERS = ("full_attention_nope", "ovq", "gated_delta_net")
# It starts as basic recall, which two layers learn best: the others start as the identity. Once
# the pairs are thin, their keys begin to come more often.
STAGES = {
    "initial_tokens_per_pair": 2,
    "curriculum_fraction": 0.3,
    "initial_occurrences": 1,
    "occurrences_fraction": 0.6,
}


def sizes(scale: Scale) -> Sizes:
    """What is trained: four layers, since a pair must be told from earlier ones of its key."""
    if scale.name == "paper":
        return paper_sizes(
            PositionalRecallTask(
                context_length=16_384,
                tokens_per_pair=DENSE,
                num_queries=256,
                num_keys=8192,
                num_values=64,
                num_filler=64,
                **STAGES,
            ),
            num_steps=STEPS[scale.name],
        )
    return Sizes(
        task=PositionalRecallTask(
            context_length=128,
            tokens_per_pair=DENSE,
            num_queries=16,
            num_keys=1024,
            num_values=16,
            num_filler=16,
            max_occurrences=4,
            **STAGES,
        ),
        num_layers=4,
        num_steps=STEPS[scale.name],
        batch_size=32,
        window_size=16,
        num_centroids=64,
        model={"num_identity_layers": 2},
    )


def positional(scale: Scale) -> Experiment:
    """Recall of the n-th value of a key against length, by ordinal."""
    trained = sizes(scale)
    start, most = trained.task.context_length, DENSE * 1024
    variants = all_variants(trained)
    points = chain(
        density_points(scale, longer(start, scale), THIN, (*SHARES, *CHUNKED)),
        density_points(scale, longer(start, scale, longest=most), DENSE, (*SHARES, *CHUNKED)),
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
