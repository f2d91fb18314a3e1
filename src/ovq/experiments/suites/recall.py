"""Recall: unique keys, trained at one length, measured from there to 65,536 tokens."""

from dataclasses import replace
from itertools import chain

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import CHUNKED, SETTINGS, density_points, kept, longer
from ovq.experiments.variants import CORE, Sizes, Variant, all_variants, make_entries, paper_sizes
from ovq.layers.ovq_attention import INITIAL_BETA
from ovq.tasks import RecallTask

NAME = "recall"
# The goals are set for the thin one; the dense one is what was trained.
THIN, DENSE = 32, 8
# It makes a start as sharp as the scale's needless, with which some seeds leave guessing too late.
SSMAX = {"ssmax_length": 128, "initial_beta": INITIAL_BETA}
# At the paper's scale, of positional recall too.
PAPER_TASK = {
    "context_length": 16_384,
    "tokens_per_pair": DENSE,
    "num_queries": 256,
    "num_keys": 8192,
    "num_values": 64,
    "num_filler": 64,
}
LONGER = 3
STEPS = {"demo": 2400, "quick": 1600, "paper": 20_000}


def sizes(scale: Scale) -> Sizes:
    """What is trained: at demo scale the recipe of `make demo`, with keys enough for 65,536."""
    if scale.name == "paper":
        task = RecallTask(**PAPER_TASK, initial_tokens_per_pair=2, curriculum_fraction=0.7)
        return replace(
            paper_sizes(task, num_steps=STEPS[scale.name]),
            model={"ssmax_length": task.context_length},
        )
    return Sizes(
        task=RecallTask(
            context_length=128,
            tokens_per_pair=DENSE,
            num_queries=16,
            num_keys=2048,
            num_values=16,
            num_filler=16,
            initial_tokens_per_pair=2,
            curriculum_fraction=0.7,
        ),
        num_layers=2,
        num_steps=STEPS[scale.name],
        batch_size=32,
        window_size=16,
        num_centroids=64,
        model=SSMAX,
    )


def _larger(variant: Variant) -> Variant:
    """The same with 480 million parameters in place of 80."""
    fields = {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_attention_heads": 24,
        "num_hidden_layers": 16,
    }
    return replace(variant, size=fields)


def recall(scale: Scale) -> Experiment:
    """In-context recall against length, thin and dense."""
    trained = sizes(scale)
    start, most = trained.task.context_length, DENSE * 2048
    variants = all_variants(trained)
    if scale.name == "paper":
        variants |= {f"{name}_480m": _larger(variants[name]) for name in CORE}
    else:
        # No run is to take twenty minutes, and MesaNet takes more; VQ with the gradient of
        # Transformer-VQ learned recall in no trial.
        del variants["mesa_net"], variants["vq"]
        # The best of the dense states, given the time to learn the task: in the steps of the
        # others none of them does, and what they forget with length cannot be told from that.
        long = {"num_steps": LONGER * trained.num_steps}
        variants["mamba2_long"] = replace(variants["mamba2"], training=long)
    points = chain(
        density_points(scale, longer(start, scale), THIN, (*SETTINGS, *CHUNKED, *kept(CHUNKED))),
        density_points(scale, longer(start, scale, longest=most), DENSE, (*SETTINGS, *CHUNKED)),
    )
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="How much of a growing context can be recalled, and with how many bytes of state?",
        entries=make_entries(NAME, scale, trained, variants, points),
        learning_rates=scale.learning_rates,
        seeds=scale.seeds,
    )
