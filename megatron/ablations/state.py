"""What has become of a run of an ablation, and whether its folder is still the one that the YAML means.

    state_of(run)                  # "absent", "interrupted", "finished", "stopped", "damaged"
    check_folders(ablation)        # LaunchError when a folder holds a run with other flags
    launch_lock(run)               # the lock that a launch of the run holds while it lives

What always holds: reading changes nothing. "finished" means that the trainer ended with status 0; an attempt that is
still at work counts as interrupted here, the launch lock tells the two apart. "damaged" is a folder whose own files
cannot be read; damage_of says which.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron.ablations.description import Ablation, PlannedRun
from megatron.run_control.attempts import read_attempts
from megatron.run_control.errors import LaunchError, why_no_folder
from megatron.run_control.exit_status import FINISHED
from megatron.run_control.heartbeat import FOLDER_VARIABLE
from megatron.run_control.run_folder import RunFolder


def damage_of(run: PlannedRun) -> str | None:
    """Which file of the run's folder cannot be read and why; None where all can, or where there is no run yet."""
    folder = RunFolder(run.folder)
    if not folder.launch.exists():
        return None
    try:
        folder.settings()
        folder.arguments()
        read_attempts(folder)
    except (LaunchError, OSError) as error:
        return str(error)
    return None


def state_of(run: PlannedRun) -> str:
    """absent: never launched; interrupted: can go on; finished; stopped: the last launch decided not to go on; damaged:
    its files cannot be read."""
    folder = RunFolder(run.folder)
    if not folder.launch.exists():
        return "absent"
    if damage_of(run) is not None:
        return "damaged"
    attempts = read_attempts(folder)
    if not attempts or attempts[-1].ended is None or attempts[-1].again:
        return "interrupted"
    return "finished" if attempts[-1].status == FINISHED else "stopped"


def why_stopped(run: PlannedRun) -> str:
    """The reason that the last attempt ended with."""
    attempts = read_attempts(RunFolder(run.folder))
    return (attempts[-1].reason if attempts else None) or "it was never started"


def check_folders(ablation: Ablation, but_damaged: bool = False) -> None:
    """Raise LaunchError for the first run folder whose flags, script, processes or variables are not the YAML's, or
    whose files are damaged, unless `but_damaged`."""
    for run in ablation.runs:
        folder = RunFolder(run.folder)
        if not folder.launch.exists():
            continue
        damage = damage_of(run)
        if damage is not None:
            if but_damaged:
                continue
            raise LaunchError(f"{damage}. Mend that, or remove {run.folder} to run it again")
        difference = folder.difference(run.recipe)
        if difference is not None:
            there, now = difference
            raise LaunchError(
                f"{ablation.file} has changed: {run.folder} was launched with {there}; it says {now} now. Change it "
                f"back, name another folder in the YAML, or remove {run.folder}"
            )


def other_folders(ablation: Ablation) -> list[str]:
    """Run folders beside those of the YAML: of an axis value or a seed that stands there no more."""
    wanted = {run.name for run in ablation.runs}
    return sorted(path.parent.name for path in ablation.folder.glob("*/launch.json") if path.parent.name not in wanted)


def take_lock(file: Path) -> int | None:
    """Lock a file for as long as the returned descriptor, or a copy of it in a child, is open; None when it is taken.

    The descriptor is above 100: scripts/slurm/lib.sh uses low ones of its own.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(descriptor)
    return high


def launch_lock(run: PlannedRun) -> int | None:
    """The lock of a run's launches; None while one of them (or its trainers' torchrun) lives, also one that somebody
    started without tools/ablate.py (rerun.sh of the folder, for example)."""
    ours = take_lock(run.folder.parent / "locks" / run.name)
    if ours is None or not run.folder.is_dir():
        return ours
    theirs = take_lock(RunFolder(run.folder).lock)
    if theirs is None:
        os.close(ours)
        return None
    os.close(theirs)
    return ours


@contextlib.contextmanager
def ablation_lock(ablation: Ablation) -> Iterator[None]:
    """One `run` at a time. Raises LaunchError while another one is at work."""
    locks = ablation.folder / "locks"
    try:
        descriptor = take_lock(locks / ".ablation")
    except OSError as error:
        raise LaunchError(
            f"{ablation.file}: folder: {ablation.folder} cannot be made or written: {why_no_folder(locks, error)}. "
            "Name another one"
        ) from None
    if descriptor is None:
        raise LaunchError(f"another tools/ablate.py run is at work on {ablation.folder}: wait for it, or end it")
    try:
        yield
    finally:
        os.close(descriptor)


def end_orphans(run: PlannedRun) -> int:
    """Kill trainers of this run that outlived a killed launch (call it with the launch lock held); returns how many.

    They are known by the variable that they inherited from the launch; two trainers would write one checkpoint folder.
    """
    folder, ended = str(run.folder.resolve()), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(FOLDER_VARIABLE) == folder:
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, timeout=30)
    return len(ended)
