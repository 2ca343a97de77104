"""tools/benchmark_replay.py: its JSON, its refusals and its --help. No assertion looks at seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_replay.py"
KEYS = {"model", "block_size", "seconds", "ratio", "ratio_low", "ratio_high", "cpu_ratio"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300)


def test_json_has_the_ordinary_the_wide_and_every_replaying_model_once(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    shape = ("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2", "--tokens", "16")
    how = ("--repeats", "2", "--threads", "1", "--json", str(path))
    done = run(*shape, *how, "--num-streams", "3", "--dropout", "--block-size", "auto", "2", "4", "2")
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    found = [(result["model"], result["block_size"]) for result in results]
    assert found[:2] == [("ordinary", None), ("wide", None)]
    assert {size for _, size in found[2:]} >= {2, 4}
    assert len(found) == len(set(found)), "a model was measured twice"
    for result in results:
        assert set(result) == KEYS
        assert result["seconds"] > 0
        assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert results[1]["ratio"] == results[1]["cpu_ratio"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["replay.json"], "something half-written was left"
    for word in ("ordinary", "wide, replay N=4", "middle half"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-streams", "1"], "--num-streams: 1 is too few; 2 or more streams are wanted"),
        (["--tokens", "many"], "--tokens: a whole number of at least 1 is wanted, got 'many'"),
        (["--block-size", "0"], "--block-size: a whole number of at least 1 is wanted, got '0'"),
        (["--num-attention-heads", "7"], "--num-attention-heads: 7 do not divide 512"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--num-layers", "2", "--block-size", "3"], "--block-size: 3 is more than the 2 layers"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_are_refused_with_exit_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_explains_every_flag_without_importing_torch() -> None:
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        f"sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for flag in ("num-streams", "num-layers", "tokens", "block-size", "repeats", "allocator", "json"):
        assert f"--{flag}" in done.stdout
