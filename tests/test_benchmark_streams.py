"""tools/benchmark_streams.py: its JSON, its refusals and its --help.

    pytest tests/test_benchmark_streams.py

No assertion looks at seconds or at a fraction's size: those belong to the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_streams.py"
KEYS = {
    "op": str,
    "direction": str,
    "backend": str,
    "dtype": str,
    "num_streams": int,
    "hidden_size": int,
    "tokens": int,
    "retention": bool,
    "fraction_of_copy": float,
    "seconds": float,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300)


def test_json_lists_every_operator_direction_backend_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    shape = ("--num-streams", "3", "--hidden-size", "16", "--tokens", "20", "--repeats", "2", "--threads", "1")
    done = run(*shape, "--retention", "--json", str(path))
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())
    for record in records:
        assert {key: type(value) for key, value in record.items()} == KEYS
        assert (record["num_streams"], record["hidden_size"], record["tokens"]) == (3, 16, 20)
        assert record["seconds"] > 0
        assert record["fraction_of_copy"] > 0
    measured = {(r["op"], r["direction"], r["backend"], r["dtype"], r["retention"]) for r in records}
    assert len(measured) == len(records), "a case was measured twice"
    assert measured == {
        (op, direction, backend, dtype, retention)
        for op, retention in (("read", False), ("write", False), ("write", True))
        for direction in ("forward", "backward")
        for backend in ("naive", "eager", "compiled")
        for dtype in ("fp32", "bf16")
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["streams.json"], "something half-written was left"
    for word in ("copy:", "retention", "compiled", "naive"):
        assert word in done.stdout


def test_fraction_is_the_bytes_of_the_table_over_the_time(tmp_path: Path) -> None:
    """With one repetition, fraction * seconds / bytes is the copy's time per byte: the same for every case of a run."""
    path = tmp_path / "streams.json"
    k, arguments = (
        4,
        ("--num-streams", "4", "--hidden-size", "8", "--tokens", "16", "--repeats", "1", "--dtype", "fp64"),
    )
    done = run(*arguments, "--backend", "auto", "--retention", "--json", str(path))
    assert done.returncode == 0, done.stderr
    moved = {
        ("read", "forward", False): k + 1,
        ("read", "backward", False): 2 * k + 1,
        ("write", "forward", False): 2 * k + 1,
        ("write", "backward", False): k + 2,
        ("write", "forward", True): 2 * k + 1,
        ("write", "backward", True): 3 * k + 2,
    }
    records = json.loads(path.read_text())
    assert len(records) == len(moved)
    rates = [r["fraction_of_copy"] * r["seconds"] / moved[r["op"], r["direction"], r["retention"]] for r in records]
    assert rates == pytest.approx([rates[0]] * len(rates))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-streams", "0"], "--num-streams: a whole number of at least 1 is wanted, got '0'"),
        (["--tokens", "many"], "--tokens: a whole number of at least 1 is wanted, got 'many'"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--backend", "magic"], "--backend: invalid choice: 'magic'"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no CUDA device here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_values_are_refused_with_exit_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--tokens", "2", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_that_was_asked_for_and_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run("--tokens", "2", "--backend", "compiled")
    assert done.returncode == 2
    assert "error: --backend compiled: no C++ compiler 'no-such-compiler' on PATH" in done.stderr


def test_help_explains_every_flag_without_importing_torch() -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    program = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r})\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for flag in (
        "num-streams",
        "hidden-size",
        "tokens",
        "dtype",
        "retention",
        "backend",
        "repeats",
        "threads",
        "device",
    ):
        assert f"--{flag}" in done.stdout
