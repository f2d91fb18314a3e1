"""All recipes by name."""

from collections.abc import Callable
from dataclasses import replace

from ovq.recipes import demo
from ovq.run_config import RunConfig
from ovq.tasks import LanguageModelingTask

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo-recall-sliding-window": demo.recall_sliding_window,
    "demo-recall-full-attention": demo.recall_full_attention,
    "demo-recall-ovq": demo.recall_ovq,
    "demo-recall-ovq-paper": demo.recall_ovq_paper,
    "demo-book": demo.book,
}


def make_run(
    recipe: str, *, seed: int | None = None, steps: int | None = None, source: str | None = None
) -> RunConfig:
    """The configuration of a recipe, with what the command line changed.

    Args:
        recipe: a name in ``RECIPES``.
        seed: of weights and data.
        steps: optimizer steps.
        source: folder of ``.txt`` files, for recipes that train on text.

    Raises:
        ValueError: an unknown recipe, or a source for one that reads no text.
    """
    if recipe not in RECIPES:
        raise ValueError(f"RECIPE must be one of {', '.join(RECIPES)}, got {recipe!r}")
    config = RECIPES[recipe]()
    changed = {
        name: value
        for name, value in (("seed", seed), ("num_steps", steps))
        if value is not None
    }  # fmt: skip
    task = config.task
    if source is not None:
        if not isinstance(task, LanguageModelingTask):
            raise ValueError(f"--source must go with a recipe that reads text, got {recipe!r}")
        task = replace(task, source=source)
    return replace(config, task=task, training=replace(config.training, **changed))
