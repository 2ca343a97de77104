"""A run killed -9 in the middle of saves loses nothing, and one whose disk is full keeps the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness_kills import STEPS, KillResult

KILLS = 20


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> KillResult:
    root = tmp_path_factory.mktemp("kills")
    here = Path(__file__).parent
    environment = {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "PYTHONPATH": f"{here.parent}:{here}"}
    with (root / "output.txt").open("w") as output:
        done = subprocess.run(
            [sys.executable, str(here / "harness_kills.py"), str(root), str(KILLS)],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    texts = "\n".join(file.read_text(errors="replace")[-3000:] for file in root.glob("*.txt"))
    assert done.returncode == 0, texts
    return KillResult(**json.loads((root / "result.json").read_text()))


def test_after_every_kill_the_tracker_names_a_whole_checkpoint(result: KillResult) -> None:
    assert len(result.moments) == KILLS, "the run had ended before it could be killed so often"
    latest = 0
    for moment in result.moments:
        assert not moment["error"], moment
        assert moment["steps"] == moment["whole"], f"part of a checkpoint stands under its name: {moment}"
        if moment["tracker"] is not None:
            assert int(moment["tracker"]) in moment["whole"], moment
            assert int(moment["tracker"]) >= latest, f"a saved step was lost: {moment}"
            latest = int(moment["tracker"])
    assert latest > KILLS // 2, "hardly any save was finished, so little was tested"


def test_kills_fell_at_different_moments_of_a_save(result: KillResult) -> None:
    assert len({tuple(moment["in_stage"]) for moment in result.moments}) >= 3


def test_the_killed_runs_together_computed_what_an_uninterrupted_run_does(result: KillResult) -> None:
    assert sorted(map(int, result.whole)) == list(range(1, STEPS + 1))
    assert result.losses == result.whole


def test_keep_last_keeps_two_and_never_less_than_one_whole(result: KillResult) -> None:
    for moment in result.moments:
        assert moment["whole"] or moment["tracker"] is None, moment
    assert len(result.full_disk_steps) == 2, "older steps, which kills had spared, were not removed"


def test_a_full_disk_is_a_clear_error_and_keeps_the_last_checkpoint(result: KillResult) -> None:
    step = result.moments[-1]["tracker"]
    # A limit on the size of files stands for the disk here; torch's zip writer hides the system's reason.
    reason = r"(File too large|a file could not be written to its end \([\d,]+ bytes are free on that disk\))"
    assert re.match(rf"saving step \d+ to .* failed: {reason}; ", result.full_disk), result.full_disk
    assert f"step {result.full_disk_tracker} is still the latest checkpoint" in result.full_disk
    assert int(result.full_disk_tracker) >= int(step)
    assert int(result.full_disk_tracker) in result.full_disk_steps
    assert "unfinished_save" not in result.full_disk_left, "what the failed save wrote was left on the full disk"
