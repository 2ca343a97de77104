"""On a real Slurm: an ablation becomes a job array, and a second `run --slurm` submits only what is missing.

The runs train nothing: their script waits for a file and ends.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_scripts import needs_own_venv
from harness_slurm import ROOT, Cluster, slurm_cluster, why_no_slurm

pytestmark = needs_own_venv

_WAITS = """
import sys, time
from pathlib import Path
while not Path(FOLDER, "go").exists():
    time.sleep(0.2)
sys.exit(1 if Path(FOLDER, "fail").exists() and "--wide-residual" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The two nodes."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(f"no Slurm here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because the path of a socket may have 107 characters
    try:
        with slurm_cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ablate(cluster: Cluster, file: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/ablate.py", "run", str(file), *options]
    return subprocess.run(
        command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, check=False, timeout=120
    )


def _statuses(folder: Path) -> dict[str, int | None]:
    files = sorted((folder / "runs").glob("*/attempts.json"))
    return {file.parent.name: json.loads(file.read_text())[-1]["status"] for file in files}


def test_an_ablation_runs_as_an_array_and_nothing_is_submitted_twice(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(_WAITS.replace("FOLDER", repr(str(tmp_path))))
    (tmp_path / "base.yaml").write_text(f"script: {tmp_path}/waits.py\nflags: {{num-layers: 2}}\n")
    text = f"base: base.yaml\nfolder: {tmp_path}/runs\naxes: {{streams: [1, 2]}}\nseeds: [1]\n"
    (tmp_path / "trial.yaml").write_text(text)
    # One attempt each: what is tried here is the array, not the guard.
    cluster.environment["MAX_RESTARTS_WITHOUT_PROGRESS"] = "1"
    (tmp_path / "fail").touch()
    options = ["--slurm", "--parallel", "2", "--", "--time=20"]
    first = _ablate(cluster, tmp_path / "trial.yaml", *options)
    assert first.returncode == 0, first.stderr
    job = first.stdout.split()[-1]
    assert first.stdout.startswith("submitted 2 runs as job")
    again = _ablate(cluster, tmp_path / "trial.yaml", *options)
    assert "nothing to submit" in again.stdout, again.stdout + again.stderr
    here = _ablate(cluster, tmp_path / "trial.yaml")
    assert f"ordinary-seed-1: left out, it is in SLURM's queue as {job}_1" in here.stdout, here.stdout + here.stderr
    (tmp_path / "go").touch()
    for element, state in (("1", "COMPLETED"), ("2", "FAILED")):
        name = f"{job}_{element}"
        cluster.wait_for(name, lambda name=name, state=state: cluster.job(name)["JobState"] == state, f"its {state}")
    assert _statuses(tmp_path) == {"ordinary-seed-1": 0, "streams-2-seed-1": 1}
    (tmp_path / "fail").unlink()
    cluster.environment["RESET_GUARD"] = "1"
    second = _ablate(cluster, tmp_path / "trial.yaml", *options)
    assert second.stdout.startswith("submitted 1 runs as job"), second.stdout + second.stderr
    name = f"{second.stdout.split()[-1]}_1"
    cluster.wait_for(name, lambda: cluster.job(name)["JobState"] == "COMPLETED", "its end")
    assert _statuses(tmp_path) == {"ordinary-seed-1": 0, "streams-2-seed-1": 0}
    logs = list((tmp_path / "runs" / "submissions").glob("slurm-*.out"))
    assert len(logs) == 3, f"each element's output lies beside the lines: {logs}"
