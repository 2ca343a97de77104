"""Builds the compiled CPU kernels of the streamwise operators, streamwise_residual_cpu.cpp, once per machine.

    library = load_library()             # a ctypes library, or CompiledKernelsError with the reason

Used by streamwise_residual_backends. The first use on a machine runs the C++ compiler (`$CXX`, else c++; about 6 s) and
keeps the library under `$MEGATRON_STREAMWISE_CACHE`, by default ~/.cache/megatron-wide-residual; later processes load
it from there.

What always holds: the file's name is a digest of the source, the compiler, its flags and the CPU's features, so a home
folder shared by different machines is safe, and it is renamed into place, so processes that build at once do not
disturb each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE_VARIABLE = "MEGATRON_STREAMWISE_CACHE"
SOURCE = Path(__file__).with_name("streamwise_residual_cpu.cpp")
_NAMES = ("controllers", "norm", "rows", "tokens", "vectors")
_HEADERS = tuple(SOURCE.with_name(f"streamwise_residual_{name}.h") for name in _NAMES)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")


class CompiledKernelsError(RuntimeError):
    """The compiled kernels cannot be had here; the message says why and what to do."""


def load_library() -> ctypes.CDLL:
    """Load the kernels, built first unless a build for this source and machine exists; else CompiledKernelsError."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CompiledKernelsError(
            f"no C++ compiler {os.environ.get('CXX', 'c++')!r} on PATH; install g++ or clang++, or point CXX at one"
        )
    library = _cache_folder() / f"streamwise_{_digest(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise CompiledKernelsError(f"{library} does not load ({error}); delete it to have it built again") from error
    return loaded


def _cache_folder() -> Path:
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "megatron-wide-residual")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompiledKernelsError(f"{folder} cannot be made ({error}); set {CACHE_VARIABLE} to a folder") from error
    return folder


def _digest(compiler: str) -> str:
    """Names a build: source, compiler and its version, flags, CPU features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [path.read_text() for path in (SOURCE, *_HEADERS)]
    parts = [*sources, compiler, version, *FLAGS, _cpu_features()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(kept)}))


def _build(compiler: str, library: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                reason = (run.stderr.strip().splitlines() or ["no message"])[0]
                raise CompiledKernelsError(f"{' '.join(command[:-2])} failed: {reason}")
            os.replace(built, library)
    except OSError as error:
        raise CompiledKernelsError(
            f"{library.parent} cannot be written ({error}); set {CACHE_VARIABLE} to a folder that can"
        ) from error
