"""The C++ kernel under the address and undefined-behaviour sanitizers: no report at all.

Compiling takes a minute, so it runs on request: ``OVQ_SANITIZE=1 pytest -m plain -k sanitizers``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ovq.ops.ovq_attention.cpu import build, library

pytestmark = pytest.mark.plain
CALLS = Path(__file__).with_name("sanitized_calls.py")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1"]
REPORTS = ("AddressSanitizer", "runtime error:", "UndefinedBehaviorSanitizer")


def shared_library(name: str) -> str | None:
    """The path of a library that g++ links, ``None`` where there is no g++ or no such library."""
    try:
        found = subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    path = Path(found.stdout.strip())
    return str(path) if path.is_absolute() and path.exists() else None


PRELOADED = [shared_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
needs_sanitizers = pytest.mark.skipif(
    None in PRELOADED, reason="needs g++ with libasan, libubsan and libstdc++"
)
on_request = pytest.mark.skipif(
    os.environ.get("OVQ_SANITIZE") != "1", reason="takes a minute or two: set OVQ_SANITIZE=1"
)


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A Python process with more environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess:
    """The same with the sanitizers' libraries loaded first; PyTorch itself is not instrumented."""
    return run_python(
        *arguments,
        LD_PRELOAD=" ".join(path for path in PRELOADED if path),
        ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0",
        UBSAN_OPTIONS="print_stacktrace=1",
        JAXTYPING_DISABLE="1",
    )


def reports_in(output: str) -> list[str]:
    """The lines in which a sanitizer speaks, each once."""
    return sorted({x for x in output.splitlines() if any(word in x for word in REPORTS)})


def compiled(folder: Path) -> Path:
    """The kernel as a library, by the build's own flags and the sanitizers'."""
    options = {
        "name": "sanitized",
        "sources": [str(library.FOLDER / library.SOURCES[0])],
        "extra_cflags": [*library.compiler_flags(), "-O1", *SANITIZE],
        "extra_ldflags": ["-fopenmp", "-fsanitize=address,undefined"],
        "build_directory": str(folder),
    }
    build._check_tools()
    # It loads what it made, and fails there: the sanitizers' own libraries must be loaded first.
    done = run_python("-c", build._COMPILE, json.dumps(options), CXX="g++", ASAN_OPTIONS="")
    made = folder / "sanitized.so"
    assert made.exists(), done.stdout
    return made


FAULTS = """
extern "C" int overflow(int x) { return x + 2147483647; }
extern "C" int outside(int x) { int* a = new int[4]; int y = a[x]; delete[] a; return y; }
"""


@needs_sanitizers
@on_request
@pytest.mark.parametrize(
    ("name", "report"), [("overflow", "runtime error: signed"), ("outside", "heap-buffer-overflow")]
)
def test_a_fault_would_be_reported(tmp_path, name, report):
    source, made = tmp_path / "faults.cpp", tmp_path / "faults.so"
    source.write_text(FAULTS)
    subprocess.run(["g++", "-shared", "-fPIC", *SANITIZE, source, "-o", made], check=True)
    done = run_sanitized("-c", f"import ctypes; ctypes.CDLL({str(made)!r}).{name}(4)")
    assert any(report in line for line in reports_in(done.stdout)), done.stdout


@needs_sanitizers
@on_request
def test_no_report(tmp_path):
    made = compiled(tmp_path)
    done = run_sanitized(str(CALLS), str(made))
    reports = reports_in(done.stdout)
    assert reports == [], "\n".join([*reports, done.stdout[-4000:]])
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count(": done") == 4
