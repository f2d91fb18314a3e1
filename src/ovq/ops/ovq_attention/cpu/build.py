"""Builds the C++ kernel of OVQ attention: ``python -m ovq.ops.ovq_attention.cpu.build``.

The library lands in a cache folder of the user, named by what it was made from, so that a changed
source, another PyTorch or another kind of processor never meets a stale library.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ovq.ops.ovq_attention.cpu.library import (
    FOLDER,
    LIBRARY_NAME,
    SOURCES,
    compiler_flags,
    library_path,
)

# Run in a process of its own: a library that is loaded once cannot be replaced.
_COMPILE = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]), is_python_module=False, verbose=True)
"""


def build(verbose: bool = False) -> Path:
    """Compile the kernel, unless it is there already.

    Args:
        verbose: show the compiler's output.

    Returns:
        The path of the library.

    Raises:
        RuntimeError: a tool is missing, or the compiler failed; one line that says what.
    """
    path = library_path()
    if path.exists():
        return path
    _check_tools()
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.parent / "build.log"
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        options = {
            "name": LIBRARY_NAME.removesuffix(".so"),
            "sources": [str(FOLDER / SOURCES[0])],
            "extra_cflags": compiler_flags(),
            "extra_ldflags": ["-fopenmp"],
            "build_directory": beside,
        }
        command = [sys.executable, "-c", _COMPILE, json.dumps(options)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log.write_text(done.stdout)
        if verbose:
            print(done.stdout)
        made = Path(beside) / LIBRARY_NAME
        if done.returncode or not made.exists():
            raise RuntimeError(
                f"building the CPU kernel failed: {_first_error(done.stdout)} (log: {log})"
            )
        os.replace(made, path)
    return path


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++")
    if sys.platform != "linux":
        raise RuntimeError(f"building the CPU kernel needs Linux, this is {sys.platform}")
    for tool, what in (
        (compiler, "a C++ compiler (g++ or clang++; or set CXX)"),
        ("ninja", "ninja"),
    ):
        if shutil.which(tool.split()[0]) is None and not _beside_python(tool):
            raise RuntimeError(f"building the CPU kernel needs {what}: no {tool!r} on the PATH")


def _beside_python(tool: str) -> bool:
    """Whether the tool lies in the environment's own folder; if so, it joins the PATH."""
    folder = Path(sys.executable).parent
    if not (folder / tool).exists():
        return False
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    return True


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "Error:" in line]
    return (errors or lines or ["no output"])[0]


if __name__ == "__main__":
    try:
        print(build(verbose="--verbose" in sys.argv[1:]))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
