"""The choice of kernels: by device and MEGATRON_STREAMWISE_BACKEND, said once, never a silent substitute.

    pytest tests/test_streamwise_residual_backends.py

Each case runs in a process of its own, since a choice is made once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read
from megatron.core.transformer.streamwise_residual_backends import streamwise_backend
for _ in range(2):
    try:
        z = streamwise_sigmoid_read(torch.ones(2, 8), torch.zeros(4), 4)
        assert torch.equal(z, torch.full((2, 2), 2.0))
        print("BACKEND", streamwise_backend(z.device))
    except Exception as error:
        print("ERROR", type(error).__name__, error)
"""


def run(cache: Path, **variables: str) -> list[str]:
    """Lines that the program printed, with these environment variables."""
    environment = {**os.environ, "MEGATRON_STREAMWISE_CACHE": str(cache), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "treamwise" in line or line.startswith(("BACKEND", "ERROR"))]


def test_first_process_builds_the_kernels_and_the_second_loads_them(tmp_path: Path) -> None:
    compiling, *first = run(tmp_path)
    assert compiling.startswith("INFO Compiling the streamwise operators with /"), compiling
    assert first[0].startswith("INFO Streamwise residual operators on cpu: compiled kernels (read compiled, "), first
    assert first[1:] == ["BACKEND compiled"] * 2
    (library,) = tmp_path.iterdir()  # no folder of an unfinished build is left
    built = library.stat().st_mtime_ns
    assert run(tmp_path) == first
    assert library.stat().st_mtime_ns == built, "the second process built again"


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    """The ranks of a node's first run; a compilation takes a gigabyte of memory."""
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: run(tmp_path), range(3)))
    assert sum(line.startswith("INFO Compiling") for lines in found for line in lines) == 1, found
    assert [lines[-1] for lines in found] == ["BACKEND compiled"] * 3


def test_without_a_compiler_auto_warns_once_with_the_reason_and_runs_eager(tmp_path: Path) -> None:
    lines = run(tmp_path, CXX="no-such-compiler")
    assert [line.split()[0] for line in lines] == ["WARNING", "INFO", "BACKEND", "BACKEND"]
    assert "no C++ compiler 'no-such-compiler' on PATH" in lines[0]
    assert lines[2] == "BACKEND eager"


def test_a_build_that_fails_is_reported_with_the_compilers_message(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no backend for you' >&2\nexit 1\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    lines = run(cache, CXX=str(compiler), MEGATRON_STREAMWISE_BACKEND="compiled")
    lines = [line for line in lines if not line.startswith("INFO Compiling")]
    assert len(lines) == 2
    assert all(line.startswith("ERROR StreamwiseBackendError") for line in lines), lines
    assert "fatal error: no backend for you" in lines[0]
    assert list(cache.iterdir()) == [], "an unfinished build was left"


def test_triton_serves_cpu_tensors_under_its_interpreter(tmp_path: Path) -> None:
    lines = run(tmp_path, MEGATRON_STREAMWISE_BACKEND="triton", TRITON_INTERPRET="1")
    assert lines[0] == (
        "INFO Streamwise residual operators on cpu: triton kernels (read triton, write triton, write and read in one "
        "pass, read and norm in one pass up to D=8192, whose row is held in registers, bias and dropout in the write)."
    )
    assert lines[1:] == ["BACKEND triton"] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MEGATRON_STREAMWISE_BACKEND": "fast"}, "must be one of auto, triton, compiled, eager, got 'fast'"),
        ({"MEGATRON_STREAMWISE_BACKEND": "compiled", "CXX": "no-such-compiler"}, "install g++ or clang++"),
        (
            {"MEGATRON_STREAMWISE_BACKEND": "compiled", "MEGATRON_STREAMWISE_CACHE": "/proc/nowhere"},
            "set MEGATRON_STREAMWISE_CACHE to a folder",
        ),
    ],
    ids=["unknown name", "no compiler", "no cache folder"],
)
def test_what_was_asked_for_and_cannot_be_had_is_an_error(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    lines = run(tmp_path, **variables)
    assert len(lines) == 2, lines
    assert all(line.startswith("ERROR") and message in line for line in lines), lines
