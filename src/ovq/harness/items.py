"""Tasks of lm-eval by name, with their items from the hub or from a folder of the user's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

# lm-eval's task files for items in a folder, one a task, of the same names as the hub's.
TASKS_FOLDER = Path(__file__).parent / "tasks"


def load_items(data: str = "", *, file: str, split: str, **metadata: Any) -> dict[str, Dataset]:
    """The items of a local task, by split: what its ``custom_dataset`` names.

    Args:
        data: the folder; lm-eval's metadata of that name.
        file: in the folder, one JSON object a line.
        split: what the task calls them.
        **metadata: whatever else lm-eval hands over.

    Raises:
        ValueError: no folder, no such file in it, or a file that holds something else.
    """
    path = Path(data, file)
    if not data or not path.is_file():
        raise ValueError(f"data must be a folder with {file}, got {data!r}")
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:  # of the encoding, too
            rows.append(None)
        if not isinstance(rows[-1], dict):
            raise ValueError(
                f"data must hold one JSON object a line, got {path} with line {number}"
            )
    if not rows:
        raise ValueError(f"data must hold at least one item, got {path} without")
    return {split: Dataset.from_list(rows)}


def local_names() -> list[str]:
    """The tasks whose items can lie in a folder."""
    return sorted(path.stem for path in TASKS_FOLDER.glob("*.yaml"))


def load_tasks(names: Sequence[str], data: Path | str | None = None) -> dict[str, Task]:
    """Tasks with their items, ready to be measured.

    Args:
        names: of lm-eval's tasks or tags, or paths of task files.
        data: a folder that holds the items of :func:`local_names`; ``None`` for the hub's.

    Returns:
        The tasks by name; a tag stands for several.

    Raises:
        ValueError: an unknown name, a group, items that are neither here nor within reach.
    """
    if not names:
        raise ValueError(f"tasks must name at least one, such as {','.join(local_names())}")
    tasks: dict[str, Task] = {}
    for name in names:
        tasks |= _load(name, data)
    return tasks


def _load(name: str, data: Path | str | None) -> dict[str, Task]:
    is_local = data is not None and name in local_names()
    known = is_local or Path(name).is_file()  # then lm-eval's own files need not be read
    manager = TaskManager(
        include_path=TASKS_FOLDER if is_local else None,
        include_defaults=not known,
        metadata={"data": str(data)} if data is not None and known else None,
    )
    if not known and name not in manager.task_index:
        raise ValueError(f"tasks must be known to lm-eval, got {name!r}: see `lm-eval ls tasks`")
    try:
        loaded = manager.load(name)
    except ConnectionError as error:
        raise ValueError(
            f"tasks must have their items here or on a hub within reach, got {name!r} ({error}): "
            f"go online, unset HF_HUB_OFFLINE, or give a folder with them, --data, for "
            f"{', '.join(local_names())}"
        ) from None
    groups = loaded.get("groups")
    if groups:
        raise ValueError(
            f"tasks must be single ones, got the group {name!r}: `python -m ovq.harness` takes it"
        )
    return loaded["tasks"]
