"""Capacity: slots at test time without training anew, and codebooks of several sizes."""

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import density_points, kept, longer
from ovq.experiments.suites.recall import DENSE, sizes
from ovq.experiments.suites.recall import NAME as RECALL
from ovq.experiments.variants import Sizes, Variant, all_variants, make_entries

NAME = "capacity"
SETTINGS = ("T/64", "T/32", "T/16", "T/8", "T/4", "T/2", "T/1")
CORE = ("ovq",)


def variants_of(sizes: Sizes) -> dict[str, Variant]:
    """Codebooks of three sizes, each 4 times the one before, with the gradient that VQ learns by.

    Their values are running means as in OVQ attention: of the two dictionaries one is static.
    """
    codes = [sizes.num_centroids * times // 8 for times in (1, 4, 16)]
    scores = {"straight_through": "scores"}
    return {
        f"vq_scores_{number}": Variant(mixer="vq", model=scores | {"num_codes": number})
        for number in codes
    }


def capacity(scale: Scale) -> Experiment:
    """Accuracy against the number of centroids, and of codes."""
    trained = sizes(scale)
    start = trained.task.context_length
    lengths = longer(start, scale, longest=16 * start)
    points = list(density_points(scale, lengths, DENSE, SETTINGS + kept(SETTINGS[2:-1])))
    known = all_variants(trained)
    shared = {name: known[name] for name in ("ovq", "ovq_paper", "vq_scores")}
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="Do more slots help without training anew, and must both dictionaries be online?",
        entries=make_entries(RECALL, scale, trained, shared, points, CORE)
        + make_entries(NAME, scale, trained, variants_of(trained), points, CORE),
        learning_rates=scale.learning_rates,
        seeds=scale.seeds,
    )
