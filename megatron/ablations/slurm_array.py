"""Runs of an ablation as a SLURM job array, through scripts/slurm/sweep.sbatch.

    job = submit(ablation, root, parallel=4, options=["--gpus-per-node=8"])
    queued(ablation)        # {"streams-4-seed-1": "17_3", ...}: what is in SLURM's queue now

Every submission has a file of launch lines of its own, because an element that is requeued reads its line again.
`submissions.json` keeps the job ids, so that a second `run --slurm` submits only what is neither finished nor queued.

What always holds: a run that is in the queue is not submitted again; without sbatch it is an error.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.ablations.description import Ablation, PlannedRun
from megatron.ablations.runner import write_recipe
from megatron.ablations.state import end_orphans, launch_lock, state_of
from megatron.run_control.errors import LaunchError
from megatron.run_control.run_folder import read_json, write_whole


def _submissions_file(ablation: Ablation) -> Path:
    return ablation.folder / "submissions.json"


def _submissions(ablation: Ablation) -> list[dict]:
    """What was submitted before: job, lines and runs of each. Raises LaunchError where the file is damaged."""
    file = _submissions_file(ablation)
    found = read_json(file, [])
    kinds = {"job": str, "lines": str, "runs": list}
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), kind) for name, kind in kinds.items()):
            raise LaunchError(f"{file} is damaged: {entry!r:.80} has no job, lines and runs")
    return list(found)


def queued(ablation: Ablation) -> dict[str, str]:
    """Runs whose array element waits or runs, with its id. Raises LaunchError when SLURM does not answer."""
    found: dict[str, str] = {}
    for submission in _submissions(ablation):
        job = submission["job"]
        command = ["squeue", "--noheader", "--array", "--format=%K", f"--jobs={job}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise LaunchError(
                f"{_submissions_file(ablation)} says that job {job} was submitted, but there is no squeue here to ask: "
                "go on where SLURM is, or remove that file"
            ) from None
        if done.returncode != 0:
            if "Invalid job id" in done.stderr:
                continue  # it ended long ago
            raise LaunchError(f"{shlex.join(command)}: {' '.join(done.stderr.split())}")
        for number in done.stdout.split():
            if number.isdecimal() and 1 <= int(number) <= len(submission["runs"]):
                found[submission["runs"][int(number) - 1]] = f"{job}_{number}"
    return found


def launch_line(run: PlannedRun) -> str:
    """What an element trains: the resolved recipe, and the run folder."""
    return shlex.join([str(write_recipe(run)), "--run-dir", str(run.folder)])


def _check_idle(run: PlannedRun) -> None:
    """Raise LaunchError for a run that a local launch is at work on."""
    lock = launch_lock(run)
    if lock is None:
        raise LaunchError(f"{run.name} is at work on this machine: wait for it before it is submitted")
    end_orphans(run)
    os.close(lock)


def submit(
    ablation: Ablation, root: Path, parallel: int | None, options: Sequence[str]
) -> tuple[str, list[PlannedRun]]:
    """Submit what is neither finished nor queued; returns the job id and the runs, both empty where nothing is left."""
    if shutil.which("sbatch") is None:
        raise LaunchError("--slurm: there is no sbatch on PATH; leave --slurm out to run here")
    waiting = queued(ablation)
    runs = [run for run in ablation.runs if run.name not in waiting and state_of(run) != "finished"]
    if not runs:
        return "", []
    for run in runs:
        _check_idle(run)
    submissions = _submissions(ablation)
    lines = ablation.folder / "submissions" / f"{len(submissions) + 1}.txt"
    write_whole(lines, "".join(f"{launch_line(run)}\n" for run in runs))
    limit = f"%{parallel}" if parallel else ""
    command = ["sbatch", "--parsable", f"--array=1-{len(runs)}{limit}", f"--job-name=ablate-{ablation.name}"]
    command += [f"--output={lines.parent}/slurm-%A_%a.out", *options]
    command += ["scripts/slurm/sweep.sbatch", str(lines)]
    environment = {"PYTHON": sys.executable, **os.environ, "REPOSITORY": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(f"{shlex.join(command)}: {' '.join(done.stderr.split())}")
    job = done.stdout.strip().partition(";")[0]
    submissions.append({"job": job, "lines": str(lines), "runs": [run.name for run in runs]})
    write_whole(_submissions_file(ablation), json.dumps(submissions, indent=1) + "\n")
    return job, runs
