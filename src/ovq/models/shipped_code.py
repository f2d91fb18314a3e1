"""What a model folder holds in place of source code when it is saved for ``trust_remote_code``."""

from collections.abc import Mapping
from pathlib import Path

CONFIG_CLASS = "configuration_ovq.OVQConfig"

# transformers would copy the source files, whose classes are then others than the installed ones,
# of another version after an update. These lines are what such a folder needs.
CODE = '''\
"""The classes of the package ovq, which must be installed: this file holds no other code."""

from ovq.models import OVQConfig, OVQForCausalLM, OVQModel  # noqa: F401
'''


def ship_code(folder: Path, auto_map: Mapping[str, str]) -> None:
    """Write the modules that a saved configuration names, each an import of the installed classes.

    Args:
        folder: of the saved model.
        auto_map: from ``Auto*`` class to ``module.Class``. Names with ``--``, of code in another
            repository, are left to it.
    """
    for reference in auto_map.values():
        if "--" not in reference:
            (folder / f"{reference.split('.')[0]}.py").write_text(CODE, encoding="utf-8")
