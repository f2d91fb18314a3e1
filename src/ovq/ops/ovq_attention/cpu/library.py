"""Where the compiled kernel is kept, and what it is made from."""

import hashlib
import os
import platform
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = ("kernel.cpp", "forward.h", "backward.h", "sequences.h", "dictionary.h", "products.h")
LIBRARY_NAME = "ovq_cpu.so"


def compiler_flags() -> list[str]:
    """The flags of this machine's vector unit, as PyTorch itself detects it."""
    flags = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"]
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        wide = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
        return [*flags, *wide, "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"]
    if capability == "AVX2":
        wide = ["-mavx2", "-mfma", "-mf16c"]
        return [*flags, *wide, "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"]
    return [*flags, "-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]


def library_path() -> Path:
    """Where the library of this source, PyTorch and processor is, or is to be."""
    made_from = hashlib.sha256()
    for name in SOURCES:
        made_from.update((FOLDER / name).read_bytes())
    kind = (torch.__version__, platform.machine(), *compiler_flags())
    made_from.update("\n".join(kind).encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "ovq" / made_from.hexdigest()[:16] / LIBRARY_NAME
