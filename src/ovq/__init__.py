"""Online vector-quantized attention for PyTorch.

The operator needs torch alone; models, tasks, training and reports are in the subpackages and need
the extras named in their error messages.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovq.ops.ovq_attention import DictionaryConfig, OVQState, ovq_attention

try:
    __version__ = version("ovq")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"

__all__ = ["DictionaryConfig", "OVQState", "__version__", "ovq_attention"]


def __getattr__(name: str):
    """The operator's names, on first use: torch takes seconds to load, and the command line starts
    without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ovq.ops import ovq_attention as operator

    return getattr(operator, name)
