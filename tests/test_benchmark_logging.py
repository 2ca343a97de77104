"""tools/benchmark_logging.py: its JSON and its refusals. No assertion looks at seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_logging.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)


def test_json_has_every_case_once(tmp_path: Path) -> None:
    shape = ("--num-layers", "1", "--hidden-size", "32", "--head-dim", "16", "--seq-length", "16", "--threads", "1")
    files = ("--json", str(tmp_path / "l.json"), "--markdown", str(tmp_path / "l.md"))
    done = run(*shape, "--repeats", "2", *files)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "l.json").read_text())["results"]
    assert [result["case"] for result in results] == ["plain", "numbers", "streams", "pictures"]
    assert [result["every"] for result in results] == [1, 1, 100, 1000]
    assert all(result["seconds"] > 0 for result in results)
    assert results[0]["ratio"] == 1
    assert "of a step" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.json", "l.md"], "something half-written was left"


def test_one_stream_is_refused() -> None:
    done = run("--num-streams", "1")
    assert done.returncode == 2
    assert "2 or more streams are wanted" in done.stderr
