"""tools/benchmark_mamba.py: its JSON, its refusals and its --help.

    pytest tests/test_benchmark_mamba.py

No assertion looks at seconds: those belong to the machine. Bytes are PyTorch's own count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_mamba.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300)


def test_json_has_every_case_and_memory_grows_linearly(tmp_path: Path) -> None:
    path = tmp_path / "mamba.json"
    shape = ("--heads", "4", "--head-dim", "16", "--state-dim", "16", "--groups", "2", "--length", "100")
    how = (
        "--repeats",
        "2",
        "--threads",
        "1",
        "--hf-chunk-size",
        "32",
        "64",
        "--memory-lengths",
        "4096",
        "8192",
        "16384",
    )
    done = run(*shape, *how, "--json", str(path))
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert [record["case"] for record in results["speed"]] == ["ours", "hf, chunk 32", "hf, chunk 64"]
    for record in results["speed"]:
        assert (record["length"], record["dtype"]) == (100, "fp32")
        assert record["forward_seconds"] > 0
        assert record["forward_backward_seconds"] > 0
    assert results["speed"][0]["speedup_over_it"] == 1
    ours = [record["our_bytes"] for record in results["memory"]]
    assert ours[1] <= 2.05 * ours[0] and ours[2] <= 2.05 * ours[1], f"peak bytes at doubled lengths: {ours}"  # noqa: PT018
    assert [entry.name for entry in tmp_path.iterdir()] == ["mamba.json"], "something half-written was left"
    for word in ("against ours", "MiB", "hf, chunk 64"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "0"], "--heads: a whole number of at least 1 is wanted, got '0'"),
        (["--heads", "4", "--groups", "3"], "--groups: 4 heads cannot be shared out to 3 groups"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no CUDA device here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_values_are_refused_with_exit_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--length", "2", "--memory-lengths", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_explains_every_flag_without_importing_torch() -> None:
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(TOOL.parent)!r}); sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for flag in ("length", "heads", "groups", "dtype", "hf-chunk-size", "memory-lengths", "repeats", "json"):
        assert f"--{flag}" in done.stdout
    assert "example: python tools/benchmark_mamba.py" in done.stdout
