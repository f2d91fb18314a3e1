"""MQAR with zoology's settings, to compare with published numbers by bytes of state."""

from dataclasses import replace

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import HALF, WHOLE
from ovq.experiments.variants import (
    AT_ONCE,
    Sizes,
    Variant,
    all_variants,
    make_entries,
    paper_sizes,
)
from ovq.points import Point
from ovq.tasks import MQARTask

NAME = "mqar"
STEPS = {"demo": 1600, "quick": 300, "paper": 20_000}
# Context and pairs at which published models are tested; the third was trained.
SETTINGS = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128))
MOST_PAIRS = 4096  # half the vocabulary are keys
TIED = {"tie_word_embeddings": True}
HIGHER_RATES = {"demo": (1e-2,)}  # beside those of all suites: thousands of tokens, each rare
MIXERS = ("full_attention_nope", "ovq", "linear_attention", "gated_delta_net", "mamba2")


def sizes(scale: Scale) -> Sizes:
    """What is trained: without a curriculum, embeddings tied to the output layer, as published."""
    if scale.name == "paper":
        task = MQARTask(context_length=16_384, tokens_per_pair=16, initial_pairs=32)
        return replace(paper_sizes(task, num_steps=STEPS[scale.name]), model=TIED)
    return Sizes(
        task=MQARTask(context_length=64, fixed_pairs=16),
        num_layers=2,
        num_steps=STEPS[scale.name],
        batch_size=32,
        window_size=8,
        num_centroids=64,  # a slot a token: filler, too, is of thousands of kinds
        # From a sharp start OVQ does not learn it in as many steps as full attention.
        model=TIED | {"initial_beta": 8.0},
    )


def mqar(scale: Scale) -> Experiment:
    """Multi-query associative recall, by bytes of state."""
    trained = sizes(scale)
    known = all_variants(trained)
    variants = {name: known[name] for name in MIXERS}
    # All pairs stand before all filler: slots that open in step with the context go to filler.
    at_once = {"dictionary": trained.dictionary(**AT_ONCE)}
    variants["ovq_immediate"] = Variant(mixer="ovq", model=at_once)
    longer = trained.task.context_length // 64
    points = [
        Point(
            length=longer * context,
            setting=setting,
            num_sequences=max(2, 2 * scale.num_answers // (longer * pairs)),
            changes={"fixed_pairs": longer * pairs},
        )
        for context, pairs in SETTINGS
        if longer * context <= scale.longest and longer * pairs < MOST_PAIRS
        for setting in ("T/4", HALF, WHOLE)
    ]
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="How do published numbers of other mixers compare, at equal bytes of state?",
        entries=make_entries(NAME, scale, trained, variants, points),
        learning_rates=HIGHER_RATES.get(scale.name, ()) + scale.learning_rates,
        seeds=scale.seeds,
    )
