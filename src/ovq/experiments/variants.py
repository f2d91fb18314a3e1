"""The models that suites compare: one mixer each, equal in parameters to full attention's."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ovq.comparison.models import TOLERANCE, num_parameters
from ovq.experiments.plan import Entry
from ovq.experiments.scales import Scale
from ovq.layers.registry import WITH_DICTIONARY, options_of
from ovq.models import OVQConfig
from ovq.points import Point, leaves_a_slot
from ovq.run_config import RunConfig, TrainingConfig, model_config
from ovq.tasks import Task, TokenTask

# Entries that a quick suite runs: the ceiling, ours, and a mixer of constant dense state.
CORE = ("full_attention_nope", "ovq", "gated_delta_net")
# Heads of these draw their decay. A model of one head or two may draw none that lasts for its
# context, and then learns nothing: here all start with one that does.
LONG_MEMORY = {"initial_decay_rate": 0.1}
# Fields of a dictionary that opens all its slots at once, as far as there are keys for them.
AT_ONCE = {"growth": "immediate", "growth_length": None}
REFERENCE = "full_attention"  # whose number of parameters all have


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A mixer and what else its model has of its own.

    Attributes:
        mixer: name in the registry, in turns with sliding windows.
        model: fields of the model that differ from the suite's.
        size: the same, but for fields that full attention, to which it is equal, has too.
        training: fields of the training that differ from the suite's.
    """

    mixer: str
    model: Mapping[str, Any] = field(default_factory=dict)
    size: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a suite trains at one scale.

    Attributes:
        task: at the trained length.
        num_layers: of every model.
        num_steps: optimizer steps.
        batch_size: sequences a step.
        window_size: of the sliding windows; VQ, which sees two blocks, has blocks of half of it. An
            eighth of the context at most, as chunks are.
        num_centroids: slots in training, and codes of VQ.
        chunk_size: tokens of OVQ's chunks; those of a window if 0.
        accumulation_steps: parts of a step, to save memory.
        model: fields of the model that differ from the scale's.
        training: fields of the training that differ from the scale's.
    """

    task: Task
    num_layers: int
    num_steps: int
    batch_size: int
    window_size: int
    num_centroids: int
    chunk_size: int = 0
    accumulation_steps: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def dictionary(self, **changes: Any) -> dict[str, Any]:
        """The dictionary that the demo has shown to work: linear growth, ``novel`` seeds."""
        return {
            "num_centroids": self.num_centroids,
            "chunk_size": self.chunk_size or self.window_size,
            "growth": "linear",
            "growth_length": self.task.context_length,
            "seeding": "novel",
        } | changes

    def papers_dictionary(self) -> dict[str, Any]:
        """The paper's growth and seeding."""
        chunk_size = self.chunk_size or self.window_size
        return {"num_centroids": self.num_centroids, "chunk_size": chunk_size}

    def fields(self, scale: Scale) -> dict[str, Any]:
        """Fields of the model that all entries share, but for what makes them equal."""
        return {
            **scale.model,
            "num_hidden_layers": self.num_layers,
            "window_size": self.window_size,
            "dictionary": self.dictionary(),
            "num_codes": self.num_centroids,
            "block_size": max(1, self.window_size // 2),
            **self.model,
        }


def paper_sizes(task: Task, *, num_steps: int, window_size: int = 128) -> Sizes:
    """What a suite trains at the paper's scale: the same model, batch and dictionary in all."""
    return Sizes(
        task=task,
        num_layers=10,
        num_steps=num_steps,
        batch_size=32,
        accumulation_steps=4,
        window_size=window_size,
        num_centroids=4096,
    )


def all_variants(sizes: Sizes) -> dict[str, Variant]:
    """Every mixer that suites compare, by the name of its entry; the most telling ones first."""
    return {
        "full_attention_nope": Variant(mixer="full_attention_nope"),
        "ovq": Variant(mixer="ovq"),
        "gated_delta_net": Variant(mixer="gated_delta_net", model=LONG_MEMORY),
        "linear_attention": Variant(mixer="linear_attention"),
        "mamba2": Variant(mixer="mamba2", model=LONG_MEMORY),
        "ovq_paper": Variant(mixer="ovq", model={"dictionary": sizes.papers_dictionary()}),
        "sliding_window": Variant(mixer="sliding_window"),
        "vq_scores": Variant(mixer="vq", model={"straight_through": "scores"}),
        "full_attention": Variant(mixer="full_attention"),
        "vq": Variant(mixer="vq"),
        "mesa_net": Variant(mixer="mesa_net"),
    }


def make_entries(
    suite: str,
    scale: Scale,
    sizes: Sizes,
    variants: Mapping[str, Variant],
    points: Iterable[Point],
    core: Iterable[str] = CORE,
) -> tuple[Entry, ...]:
    """One entry a variant, in order, of equal numbers of parameters within 2 %.

    Args:
        suite: in whose folder the runs lie.
        scale: of the experiment.
        sizes: what is trained.
        variants: by name of the entry.
        points: to measure; those without a slot left are left out, and mixers without a dictionary
            are measured once for all its settings.
        core: names that alone are run if the scale says so.

    Raises:
        ValueError: a variant that cannot be made equal.
    """
    chosen = {n: v for n, v in variants.items() if n in core or not scale.core_only}
    wanted = list(points)
    return tuple(
        _make_entry(suite, name, scale, sizes, variant, wanted) for name, variant in chosen.items()
    )


def _make_entry(
    suite: str, name: str, scale: Scale, sizes: Sizes, variant: Variant, points: list[Point]
) -> Entry:
    training: dict[str, Any] = {
        "num_steps": sizes.num_steps,
        "batch_size": sizes.batch_size,
        "learning_rate": scale.learning_rates[0],
        "accumulation_steps": sizes.accumulation_steps,
        "seed": scale.seeds[0],
        **scale.training,
        **sizes.training,
        **variant.training,
    }
    config = RunConfig(
        name=f"{suite}-{name}",
        task=sizes.task,
        model=equal_fields(sizes.task, sizes.fields(scale) | dict(variant.size), variant),
        training=TrainingConfig(**training),
    )
    return Entry(suite=suite, name=name, config=config, points=points_of(config, points))


def equal_fields(task: Task, base: dict[str, Any], variant: Variant) -> dict[str, Any]:
    """The fields of a variant's model, with as many parameters as full attention's.

    As in :func:`ovq.comparison.models.equal_models`, the width of the feed-forward blocks makes up
    for what the mixers differ in.

    Args:
        task: whose ends the models have.
        base: fields of full attention's model, and of the variant's but for its own.
        variant: the mixer, and its own fields.

    Raises:
        ValueError: no ``intermediate_size`` makes it equal within 2 %.
    """
    fields = {
        **options_of(variant.mixer, {**base, **variant.model}),
        "layer_pattern": ["sliding_window", variant.mixer],
    }
    target = _count(task, base | {"layer_pattern": ["sliding_window", REFERENCE]})
    if variant.mixer == REFERENCE and not variant.model:
        return fields
    one, two = (_count(task, fields | {"intermediate_size": size}) for size in (1, 2))
    found = fields | {"intermediate_size": 1 + round((target - one) / (two - one))}
    if found["intermediate_size"] < 1 or abs(_count(task, found) / target - 1) > TOLERANCE:
        raise ValueError(
            f"variant must be equal to {target:,} parameters within {TOLERANCE:.0%}, got "
            f"{variant.mixer!r} with intermediate_size {found['intermediate_size']}"
        )
    return found


def _count(task: Task, fields: dict[str, Any]) -> int:
    """Parameters of a model; its dictionary and its codes are none."""
    ends = {"vocab_size": task.vocab_size if isinstance(task, TokenTask) else 1}
    numbers = {n: v for n, v in fields.items() if n not in ("dictionary", "num_codes")}
    return _num_parameters(json.dumps(ends | numbers, sort_keys=True))


@lru_cache(maxsize=512)
def _num_parameters(fields: str) -> int:
    return num_parameters(OVQConfig(**json.loads(fields)))


def points_of(config: RunConfig, points: Iterable[Point]) -> tuple[Point, ...]:
    """Those points that can be measured of a run, each once."""
    shape = model_config(config.task, config.model)
    found: list[Point] = []
    for point in points:
        if WITH_DICTIONARY.isdisjoint(shape.mixer_names):
            point = replace(point, setting=None)
        elif point.setting and not leaves_a_slot(point.setting, shape, point.task_of(config.task)):
            continue
        if point not in found:
            found.append(point)
    return tuple(found)
