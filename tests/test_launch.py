"""scripts/launch.sh without SLURM: the README's commands, ^C that saves, rerun.sh that goes on, restarts, guard."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness_scripts import REPOSITORY, needs_own_venv, readme_commands, run_script, script_environment

from megatron.run_control.exit_status import SAVED_ON_REQUEST
from megatron.run_control.recipes import load_recipe
from megatron.run_control.run_folder import RunFolder

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
    second = run_script(*command, LOCK_SECONDS="0")
    assert second.returncode == 2
    assert f"{run} is at work already, launched by process {process.pid} on " in second.stderr
    assert process.poll() is None
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
    launch = str(REPOSITORY / "scripts" / "launch.sh")
    again = run_script(launch, "--rerun", "run", cwd=tmp_path, MAX_RESTARTS_WITHOUT_PROGRESS="2")
    assert again.returncode == 3
    assert "not started: 2 attempts in a row" in (run / "log.txt").read_text()
    for words, complaint in (
        (("--rerun", ""), "--rerun : no run folder"),
        (("--rerun", "nowhere"), "--rerun nowhere: no run folder"),
        (("--rerun", "run", "--lr", "1"), "one run folder and nothing else; 3 words were given"),
    ):
        wrong = run_script(launch, *words, cwd=tmp_path)
        assert (wrong.returncode, complaint in wrong.stderr) == (2, True), wrong.stderr


@pytest.mark.parametrize("delay", [0.4, 1.2])
def test_a_launch_that_is_told_to_end_before_its_first_step_trains_nothing(tmp_path: Path, delay: float) -> None:
    """While the run folder is prepared, or the attempt begun."""
    run = tmp_path / "run"
    command = ["scripts/launch.sh", "scripts/recipes/tiny-gpt.yaml", "--run-dir", str(run), "--train-iters", "400"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=script_environment(), stdout=out, stderr=out)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=200)
    said = (tmp_path / "out").read_text()
    assert status != 0, said[-2000:]
    assert 400 not in _steps(run), "it was told to end and trained to the end"
    assert "told to end (TERM)" in said


@pytest.mark.parametrize(
    "words", [["--help"], [], ["scripts/recipes/tiny-gpt.yaml", "--lr", "1", "--help"], ["x", "-h"]]
)
def test_help_says_what_the_script_does(words: list[str]) -> None:
    done = run_script("scripts/launch.sh", *words, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--run-dir DIR" in done.stdout
    assert "set -euo" not in done.stdout


def test_a_launch_that_cannot_start_says_why_in_one_line_and_makes_no_folder(tmp_path: Path) -> None:
    recipe, run = str(REPOSITORY / "scripts" / "recipes" / "tiny-gpt.yaml"), str(tmp_path / "run")
    launch = [str(REPOSITORY / "scripts" / "launch.sh"), recipe, "--run-dir", run]
    for words, variables, complaint in (
        ([launch[0], ""], {}, "name a recipe first"),
        (launch[:-1], {}, "--run-dir needs one value; none was given"),
        (launch, {"LOCK_SECONDS": "soon"}, "LOCK_SECONDS is 'soon', a whole number of seconds"),
        (launch, {"WATCHDOG_SECONDS": "soon"}, "WATCHDOG_SECONDS is 'soon', a number of seconds"),
        (launch, {"MASTER_ADDR": "here", "MASTER_PORT": "soon"}, "MASTER_PORT is 'soon' and MASTER_ADDR is set"),
        (launch, {"MASTER_ADDR": "here"}, "MASTER_PORT is '' and MASTER_ADDR is set, a port from 1"),
        (launch, {"PYTHON": "/etc"}, "no Python at /etc"),
    ):
        done = run_script(*words, cwd=tmp_path, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert "error: " in done.stderr
        assert complaint in done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    for name in ("log.txt", "launch.lock"):
        folder = RunFolder(tmp_path / name / "run")
        folder.create(load_recipe(Path(recipe)), REPOSITORY)
        (folder.path / name).mkdir()
        done = run_script(launch[0], "--rerun", str(folder.path))
        assert done.returncode == 2
        assert f"error: {folder.path / name} cannot be written: mend it, or choose another --run-dir" in done.stderr
        assert not folder.attempts.exists()


def _locking(run: Path, **variables: str) -> subprocess.Popen:
    """A launcher that has gone as far as the lock, and stays until its standard input ends."""
    code = f"repository={shlex.quote(str(REPOSITORY))}; . scripts/slurm/lib.sh; run={shlex.quote(str(run))}; lock_run"
    return subprocess.Popen(
        ["bash", "-euc", f"{code}; echo locked; read -r _ || true"],
        cwd=REPOSITORY,
        env=script_environment(**{"LOCK_SECONDS": "0", **variables}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_has_one_launch_at_a_time_and_no_lock_outlives_its_holder(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}
    for first, mine in (({}, "process "), (job, "job 17 on ")):
        holder = _locking(tmp_path, **first)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert (tmp_path / "launch.lock").read_text().startswith(mine)
        for others in ({}, {**job, "SLURM_JOB_ID": "18", "SLURM_RESTART_COUNT": "1"}):
            out, err = (other := _locking(tmp_path, **others)).communicate(timeout=20)
            assert (other.returncode, out) == (2, "")
            assert f"is at work already, launched by {mine}" in err
        holder.kill()
        holder.communicate(timeout=20)
        again = _locking(tmp_path, **first)
        assert again.communicate("\n", timeout=20) == ("locked\n", "")


def test_a_requeued_job_is_not_stopped_by_the_lock_of_its_own_last_start(tmp_path: Path) -> None:
    """As a file server has it that still keeps the lock of a node that is dead."""
    job = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}
    ghost = _locking(tmp_path, **job)
    assert ghost.stdout is not None
    assert ghost.stdout.readline() == "locked\n"
    out, err = (requeued := _locking(tmp_path, **job, SLURM_RESTART_COUNT="1")).communicate("\n", timeout=20)
    assert (requeued.returncode, out) == (0, "locked\n"), err
    assert "still held by this job's last start; going on" in err
    ghost.communicate("\n", timeout=20)
