"""Ablations: one choice of OVQ attention changed at a time, on recall."""

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import HALF, SHARES, WHOLE, density_points, longer
from ovq.experiments.suites.recall import DENSE, THIN, sizes
from ovq.experiments.suites.recall import NAME as RECALL
from ovq.experiments.variants import AT_ONCE, Sizes, Variant, all_variants, make_entries
from ovq.layers.ovq_attention import INITIAL_BETA

NAME = "ablations"
SETTINGS = (*SHARES, HALF, WHOLE)
CORE = ("ovq", "saturating")


def variants_of(sizes: Sizes) -> dict[str, Variant]:
    """What differs from the suite's ``ovq``: linear growth, novel seeds, exact means, C = W, half
    a slot a token in training, scalable softmax.
    """
    base, small = sizes.dictionary(), max(1, sizes.window_size // 2)
    changes = {
        "slot_a_token": {"num_centroids": sizes.task.context_length},
        "saturating": {"growth": "saturating", "growth_length": None},
        "immediate": AT_ONCE,
        "spread": {"seeding": "spread"},
        "random": {"seeding": "random"},
        "constant_rate": {"rate": "constant"},
        "half_chunk": {"chunk_size": small},
        "unit": {"centroid": "unit"},
        # The rule that loses least on a pretrained model; as many exact tokens in all.
        "direction_window": {"centroid": "direction", "chunk_size": small, "window_size": small},
    }
    found = {
        name: Variant(mixer="ovq", model={"dictionary": base | fields})
        for name, fields in changes.items()
    }
    return found | {
        "short_convolution": Variant(mixer="ovq", model={"use_short_conv": True}),
        "fixed_beta": Variant(mixer="ovq", training={"frozen": ("log_beta",)}),
        "plain_softmax": Variant(mixer="ovq", model={"ssmax_length": None}),
        "high_beta": Variant(mixer="ovq", model={"initial_beta": 4 * INITIAL_BETA}),
    }


def ablations(scale: Scale) -> Experiment:
    """Growth, seeding, rate, chunks, centroids, short convolution, temperature.

    All at one learning rate, the last, which ``recall`` chooses for ``ovq`` at demo scale: choosing
    one for each would be half as many runs again.
    """
    trained = sizes(scale)
    start = trained.task.context_length
    lengths = longer(start, scale, longest=16 * start)
    points = [
        point
        for density in (THIN, DENSE)
        for point in density_points(scale, lengths, density, SETTINGS)
    ]
    shared = {name: all_variants(trained)[name] for name in ("ovq", "ovq_paper")}
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="Which of its choices does OVQ attention owe its recall to?",
        entries=make_entries(RECALL, scale, trained, shared, points, CORE)
        + make_entries(NAME, scale, trained, variants_of(trained), points, CORE),
        learning_rates=scale.learning_rates[-1:],
        seeds=scale.seeds,
    )
