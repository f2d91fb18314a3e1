"""In-context regression: 1 to 128 linear functions in one sequence."""

from collections.abc import Iterator

from ovq.experiments.plan import Experiment
from ovq.experiments.scales import Scale
from ovq.experiments.suites.pairs import SETTINGS, WHOLE, kept
from ovq.experiments.variants import Sizes, all_variants, make_entries, paper_sizes
from ovq.points import Point
from ovq.tasks import InContextRegressionTask

NAME = "regression"
STEPS = {"demo": 2000, "quick": 200, "paper": 50_000}
NUM_FUNCTIONS = (1, 8, 32, 128)
PLACES_A_FUNCTION = 32  # sixteen examples of each, at least
MIXERS = ("full_attention_nope", "ovq", "linear_attention", "gated_delta_net", "vq_scores")


def sizes(scale: Scale) -> Sizes:
    """What is trained: from one function to as many as the context has eight examples of."""
    if scale.name == "paper":
        return paper_sizes(
            InContextRegressionTask(
                context_length=16_384,
                num_features=16,
                noise_std=0.5,
                num_functions=128,
                initial_functions=1,
            ),
            num_steps=STEPS[scale.name],
        )
    return Sizes(
        task=InContextRegressionTask(
            context_length=256,
            num_features=2,
            noise_std=0.5,
            num_functions=16,
            code_length=16,
            initial_functions=1,
            curriculum_fraction=0.7,
        ),
        num_layers=2,
        num_steps=STEPS[scale.name],
        batch_size=16,
        window_size=32,
        num_centroids=128,
        # A sharp softmax learns to average near points first, before it has to tell functions
        # apart, and stays with that; one that starts blunt finds the sums of least squares.
        model={"initial_beta": 2.0},
    )


def function_points(scale: Scale, trained_length: int) -> Iterator[Point]:
    """Numbers of functions, the longest context for the most, each example asked for once."""
    for number in NUM_FUNCTIONS:
        length = max(trained_length, PLACES_A_FUNCTION * number)
        for setting in (*SETTINGS, WHOLE, *kept(SETTINGS)):
            yield Point(
                length=length,
                setting=setting,
                num_sequences=max(2, 32 * scale.num_answers // length),
                changes={"num_functions": number},
            )


def regression(scale: Scale) -> Experiment:
    """Error in linear functions learned from the sequence, by their number."""
    trained = sizes(scale)
    variants = all_variants(trained)
    return Experiment(
        name=NAME,
        scale=scale.name,
        question="Are all functions of a sequence learned, or one that is the mean of them?",
        entries=make_entries(
            NAME,
            scale,
            trained,
            {name: variants[name] for name in MIXERS},
            function_points(scale, trained.task.context_length),
        ),
        learning_rates=scale.learning_rates,
        seeds=scale.seeds,
    )
