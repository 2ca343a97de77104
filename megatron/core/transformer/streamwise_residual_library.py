"""Builds the compiled CPU operators of the streams, once per machine.

    library = load_library()         # the namespace in torch.ops, or CompiledKernelsError with the reason

Two units: the kernels (streamwise_residual_cpu.cpp) and what makes operators of PyTorch of them
(streamwise_residual_torch.cpp), compiled side by side.

Used by streamwise_residual_backends. The first use on a machine runs the C++ compiler (`$CXX`, else c++; GCC 11, clang
14 or newer; about 20 s on two cores) and keeps the library under `$MEGATRON_STREAMWISE_CACHE`, by default
~/.cache/megatron-wide-residual; later processes load it from there. PyTorch's headers come with its wheel; those of
Python are not needed.

What always holds: the file's name is a digest of the sources, the compiler, its flags, the CPU's features and PyTorch's
version, so a home folder shared by different machines is safe; it is renamed into place, and of processes that want it
at once one builds and the others wait where the file system has locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MEGATRON_STREAMWISE_CACHE"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC")
_FOLDER = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_STANDARDS = {"cpu": "-std=c++17", "torch": "-std=c++20"}
"""What is compiled by itself, and its language. (`-O2` made the second one no quicker to compile.)"""
_HEADERS = ("controllers", "kernels", "norm", "rows", "tensors", "tokens", "vectors")


OPERATORS = ("read", "read_through", "write", "write_read")


class CompiledKernelsError(RuntimeError):
    """The compiled kernels cannot be had here; the message says why and what to do."""


def load_library() -> Any:
    """Load the operators, built first unless a build for these sources and this machine exists.

    Returns: the namespace in torch.ops with `read`, `read_through`, `write` and `write_read`.
    Raises: CompiledKernelsError.
    """
    wanted = os.environ.get("CXX") or "c++"
    compiler = shutil.which(wanted)
    if compiler is None:
        raise CompiledKernelsError(f"no C++ compiler {wanted!r} on PATH; install g++ or clang++, or point CXX at one")
    name = f"streamwise_{_digest(compiler)}"
    library = _cache_folder() / f"{name}.so"
    if not library.exists():
        with _one_at_a_time(library.parent):
            if not library.exists():
                _build(compiler, library)
    try:
        _refuse_cut(library)
        torch.ops.load_library(str(library))
        operators = getattr(torch.ops, name)
        for operator in OPERATORS:
            getattr(operators, operator)
    except (OSError, AttributeError) as error:
        raise CompiledKernelsError(f"{library} does not load ({error}); delete it to have it built again") from error
    return operators


def _refuse_cut(library: Path) -> None:
    """OSError for an ELF file whose end is missing: touching the lost pages would kill the process without a word."""
    with library.open("rb") as file:
        head = file.read(64)
    if head[:5] != b"\x7fELF\x02" or len(head) < 64:
        return  # the loader refuses what it does not know
    order = "<" if head[5] == 1 else ">"
    (sections_at,) = struct.unpack_from(order + "Q", head, 40)
    size, count = struct.unpack_from(order + "HH", head, 58)
    wanted = sections_at + size * count
    if library.stat().st_size < wanted:
        raise OSError(f"{library.stat().st_size} bytes of at least {wanted}")


def _cache_folder() -> Path:
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "megatron-wide-residual")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompiledKernelsError(f"{folder} cannot be made ({error}); set {CACHE_VARIABLE} to a folder") from error
    return folder


def _sources() -> list[Path]:
    files = [f"{unit}.cpp" for unit in _STANDARDS] + [f"{header}.h" for header in _HEADERS]
    return [_FOLDER / f"streamwise_residual_{file}" for file in files]


def _digest(compiler: str) -> str:
    """Names a build: sources, compiler and its version, flags, CPU features, PyTorch."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise CompiledKernelsError(f"{compiler} does not run ({error}); point CXX at a C++ compiler") from error
    sources = [path.read_text() for path in _sources()]
    of_torch = [torch.__version__, str(torch.version.git_version)]
    parts = [*sources, compiler, version, *FLAGS, *_STANDARDS.values(), _cpu_features(), *of_torch]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(kept)}))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in the folder. Without locks both build, which costs time alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(compiler: str, library: Path) -> None:
    logger.info("Compiling the streamwise operators with %s, once for this machine (about 20 s).", compiler)
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
            objects = {unit: str(Path(folder) / f"{unit}.o") for unit in _STANDARDS}
            shared = [*FLAGS, "-isystem", str(_TORCH / "include"), f"-DSTREAMWISE_NAME={library.stem}"]
            _run_all(
                [
                    compiler,
                    *shared,
                    standard,
                    "-c",
                    str(_FOLDER / f"streamwise_residual_{unit}.cpp"),
                    "-o",
                    objects[unit],
                ]
                for unit, standard in _STANDARDS.items()
            )
            built = str(Path(folder) / library.name)
            libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
            _run_all([[compiler, *FLAGS, "-shared", *objects.values(), *libraries, "-o", built]])
            if not Path(built).exists():
                raise CompiledKernelsError(f"{compiler} made no library and no error; point CXX at a C++ compiler")
            os.replace(built, library)
    except OSError as error:
        raise CompiledKernelsError(
            f"{library.parent} cannot be written ({error}); set {CACHE_VARIABLE} to a folder that can"
        ) from error


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run commands side by side; CompiledKernelsError with the first message of one that fails, when all have ended."""
    running = [
        (command, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for command in commands
    ]
    messages = [(command, process.communicate()[1], process.returncode) for command, process in running]
    for command, message, status in messages:
        if status:
            lines = message.strip().splitlines() or ["no message"]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise CompiledKernelsError(f"{' '.join(command[:-2])} failed: {reason}")
