"""The choice of kernels: by device and MEGATRON_STREAMWISE_BACKEND, said once, never a silent substitute.

    pytest tests/test_streamwise_residual_backends.py

Each case runs in a process of its own, since a choice is made once per process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness_preloaded import can_preload, run_preloaded

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True, format="%(levelname)s %(message)s")
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


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A C++ compiler that does not optimise, which takes a third of the time."""
    path = tmp_path_factory.mktemp("compiler") / "c++"
    path.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "c++")} "$@" -O0\n')
    path.chmod(0o755)
    return str(path)


def run(cache: Path, **variables: str) -> list[str]:
    """Lines that the program printed, with these environment variables."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_STREAMWISE_CACHE": str(cache), **variables}
    environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        program, log = Path(folder, "program.py"), Path(folder, "log")
        program.write_text(PROGRAM)
        if can_preload(environment) and "TRITON_INTERPRET" not in variables:  # which Triton reads at import
            status = run_preloaded([str(program)], environment, Path(folder), log)
        else:
            with log.open("w") as output:
                command = [sys.executable, "-W", "ignore", str(program)]
                status = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=300).returncode
        said = log.read_text()
    assert status == 0, said
    return [line for line in said.splitlines() if "treamwise" in line or line.startswith(("BACKEND", "ERROR"))]


def test_processes_that_start_at_once_build_once_and_later_ones_load(tmp_path: Path, compiler: str) -> None:
    """The ranks of a node's first run; a compilation takes a gigabyte of memory."""
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: run(tmp_path, CXX=compiler), range(3)))
    compiling = [line for lines in found for line in lines if line.startswith("INFO Compiling")]
    assert len(compiling) == 1, found
    assert compiling[0].startswith("INFO Compiling the streamwise operators with /"), compiling
    loaded = [[line for line in lines if line not in compiling] for lines in found]
    assert loaded[0][0].startswith("INFO Streamwise residual operators on cpu: compiled kernels (read compiled, "), (
        found
    )
    assert loaded[0][1:] == ["BACKEND compiled"] * 2
    assert loaded == [loaded[0]] * 3
    (library,) = tmp_path.iterdir()  # no folder of an unfinished build is left
    built = library.stat().st_mtime_ns
    assert run(tmp_path, CXX=compiler) == loaded[0]
    assert library.stat().st_mtime_ns == built, "a later process built again"

    whole = library.read_bytes()
    a_library = Path(torch.__file__).parent / "lib" / "libc10.so"
    for damaged in (whole[: len(whole) // 2], b"not a library", b"", a_library.read_bytes()):
        library.unlink()  # a process may have it mapped
        library.write_bytes(damaged)
        warning, _, *backends = run(tmp_path, CXX=compiler)
        assert warning.startswith("WARNING"), warning
        assert f"{library} does not load" in warning, warning
        assert backends == ["BACKEND eager"] * 2


def test_without_a_compiler_auto_warns_once_with_the_reason_and_runs_eager(tmp_path: Path) -> None:
    lines = run(tmp_path, CXX="no-such-compiler")
    assert [line.split()[0] for line in lines] == ["WARNING", "INFO", "BACKEND", "BACKEND"]
    assert "no C++ compiler 'no-such-compiler' on PATH" in lines[0]
    assert lines[2] == "BACKEND eager"


def test_a_compiler_that_does_not_run_or_makes_nothing_is_reported(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    junk.chmod(0o755)
    for compiler, message in ((str(junk), "does not run"), ("/bin/true", "made no library")):
        lines = [line for line in run(tmp_path / "cache", CXX=compiler) if not line.startswith("INFO Compiling")]
        assert message in lines[0], lines
        assert lines[-1] == "BACKEND eager"


def test_a_fake_tensor_is_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read, streamwise_sigmoid_writeback

    x, logits = torch.ones(2, 8), torch.zeros(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_x, fake_u, fake_logits = torch.ones(2, 8), torch.ones(2, 2), torch.zeros(4)
        for stream, controller in ((fake_x, fake_logits), (fake_x, logits), (x, fake_logits)):
            with pytest.raises(RuntimeError, match="tensor in memory is wanted"):
                streamwise_sigmoid_read(stream, controller, 4)
        with pytest.raises(RuntimeError, match="tensor in memory is wanted"):
            streamwise_sigmoid_writeback(x, fake_u, logits, 4)


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
