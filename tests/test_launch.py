"""scripts/launch.sh without SLURM: the README's commands, ^C that saves, rerun.sh that goes on, restarts, guard."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

from harness_scripts import REPOSITORY, needs_own_venv, readme_commands, run_script, script_environment

from megatron.run_control.exit_status import SAVED_ON_REQUEST

pytestmark = needs_own_venv

LAUNCH = "./scripts/launch.sh scripts/recipes/tiny-gpt.yaml --run-dir runs/tiny --train-iters 20"
SHOW = ".venv/bin/python tools/runs.py runs --once"
_STEP_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|")


def _steps(run: Path) -> list[int]:
    log = run / "log.txt"
    return [int(step) for step in _STEP_LINE.findall(log.read_text())] if log.exists() else []


def _statuses(run: Path) -> list[int]:
    return [attempt["status"] for attempt in json.loads((run / "attempts.json").read_text())]


def test_the_readmes_launch_trains_and_its_table_shows_the_run(tmp_path: Path) -> None:
    assert {LAUNCH, SHOW} <= set(readme_commands())
    here = [word.replace("runs/tiny", str(tmp_path / "tiny")) for word in shlex.split(LAUNCH)]
    done = run_script(*here, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert _steps(tmp_path / "tiny") == list(range(1, 21))
    there = [str(tmp_path) if word == "runs" else word for word in shlex.split(SHOW)]
    shown = run_script(*there)
    assert re.search(r"tiny +finished +20/20 +\d\.\d+ ", shown.stdout), shown.stdout + shown.stderr


def test_an_interrupted_launch_saves_and_its_rerun_does_every_other_step_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["scripts/launch.sh", "scripts/recipes/tiny-gpt.yaml", "--run-dir", str(run), "--train-iters", "120"]
    with (tmp_path / "out").open("w") as out:  # a pipe that no one reads would stop the run when it is full
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=script_environment(OMP_NUM_THREADS="1"), stdout=out, stderr=out
        )
    deadline = time.monotonic() + 300
    while len(_steps(run)) < 5:
        assert process.poll() is None, (tmp_path / "out").read_text()[-4000:]
        assert time.monotonic() < deadline, "no step in 300 s"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # as a terminal's ^C: the trainers have a session of their own
    assert process.wait(timeout=200) == SAVED_ON_REQUEST, (tmp_path / "out").read_text()[-4000:]
    saved = _steps(run)
    assert saved[-1] < 120, "the run had ended before it could be interrupted"
    done = run_script(str(run / "rerun.sh"), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert _steps(run) == list(range(1, 121))
    assert _statuses(run) == [SAVED_ON_REQUEST, 0]


def test_a_failing_run_is_started_again_until_the_guard_stops_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "fails.py").write_text("raise RuntimeError('no such device')\n")
    (tmp_path / "fails.yaml").write_text(f"script: {tmp_path}/fails.py\nflags: {{seed: 1}}\n")
    command = ["scripts/launch.sh", str(tmp_path / "fails.yaml"), "--run-dir", str(run)]
    done = run_script(*command, MAX_RESTARTS_WITHOUT_PROGRESS="2")
    assert done.returncode == 1
    assert _statuses(run) == [1, 1]
    log = (run / "log.txt").read_text()
    assert "RuntimeError: no such device" in log
    assert "2 attempts in a row ended without a new checkpoint" in log
    again = run_script(*command, MAX_RESTARTS_WITHOUT_PROGRESS="2")
    assert again.returncode == 3
    assert "not started: 2 attempts in a row" in (run / "log.txt").read_text()


def test_help_says_what_the_script_does() -> None:
    done = subprocess.run(
        ["scripts/launch.sh", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == 0
    assert "--run-dir DIR" in done.stdout
    assert "set -euo" not in done.stdout
