"""What runs take on two cores, from measured times of a step: estimates, for plans and progress.

They are meant for models of hidden size 64, as at demo scale; at others only their ratios count.
"""

from collections.abc import Iterable

from ovq.models import OVQConfig
from ovq.ops.vq_attention import SHORT
from ovq.points import Point, dictionary_of
from ovq.run_config import RunConfig, model_config
from ovq.tasks import Task, TokenTask
from ovq.tasks.pairs import PairTask

# Microseconds a token of one layer, mixer and feed-forward block: forward and backward, and
# forward alone, the latter taken as a third. At 128 tokens and 32 sequences; what one thread
# takes, halved: two runs of one thread each go on side by side.
TRAINING = {
    "full_attention": 5.4,
    "full_attention_nope": 5.4,
    "sliding_window": 5.4,
    "ovq": 5.8,
    "vq": 8.0,
    "linear_attention": 6.0,
    "gated_delta_net": 13.0,
    "mamba2": 13.0,
    "mesa_net": 160.0,
}
FORWARD = 1 / 3
# Microseconds for each pair of a token and one that it attends to, or a slot, by head.
PAIR = 0.0055
# The same for each code of VQ: of short sequences, and of others, with means before each block.
SHORT_CODE, CODE = 0.04, 0.3
LOGIT = 0.012  # microseconds for each number of the output layer
STEP = 0.010  # seconds of a step, whatever its size
EXAMPLE = 0.0003  # seconds to draw a sequence
RUN = 5.0  # seconds to begin and end a run
POINT = 0.3  # seconds of a point, beside its sequences


def training_minutes(config: RunConfig) -> float:
    """Of one run."""
    training, shape = config.training, model_config(config.task, config.model)
    seconds = sum(
        steps * parts * (_sequence_seconds(shape, task, backward=True) + EXAMPLE)
        for steps, parts, task in config.stages
    )
    return (RUN + training.num_steps * STEP + training.batch_size * seconds) / 60


def evaluation_minutes(config: RunConfig, points: Iterable[Point]) -> float:
    """Of all points of one run, and of its validation."""
    shape, seconds = model_config(config.task, config.model), RUN
    for point in points:
        task = point.task_of(config.task)
        a_sequence = _sequence_seconds(shape, task, backward=False, setting=point.setting)
        seconds += POINT + point.num_sequences * (a_sequence + EXAMPLE)
    return seconds / 60


def _sequence_seconds(
    shape: OVQConfig, task: Task, *, backward: bool, setting: str | None = None
) -> float:
    T = task.sequence_length
    slots = shape.dictionary["num_centroids"]
    if setting is not None:
        slots = dictionary_of(setting, shape, task)["num_centroids"]
    layers = sum(
        T * (TRAINING[mixer] + _attending(shape, mixer, T, slots)) for mixer in shape.mixer_names
    )
    return 1e-6 * (1.0 if backward else FORWARD) * (layers + LOGIT * _num_logits(task))


def _attending(shape: OVQConfig, mixer: str, num_tokens: int, slots: int) -> float:
    """Microseconds a token for the keys, slots or codes that it meets, over all heads."""
    each = {
        "full_attention": PAIR * num_tokens / 2,
        "full_attention_nope": PAIR * num_tokens / 2,
        "ovq": PAIR * slots,
        "vq": (SHORT_CODE if num_tokens <= SHORT else CODE) * shape.num_codes,
    }
    return shape.num_attention_heads * each.get(mixer, 0.0)


def _num_logits(task: Task) -> int:
    """Of a sequence, at those positions that some sequence of a batch is asked at."""
    if not isinstance(task, TokenTask):
        return 0
    if isinstance(task, PairTask):
        return task.num_queries * task.vocab_size
    pairs = getattr(task, "num_pairs", 0)
    return (task.context_length // 2 - pairs) * task.vocab_size
