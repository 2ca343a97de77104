"""Runs a training script on one node through torchrun and ends with a status that says what happened.

    MEGATRON_RUN_FOLDER=runs/x MEGATRON_RUN_ATTEMPT=1 python -m megatron.run_control.node_agent

It reads script, processes and flags from the run folder, and where it is from SLURM_NNODES, SLURM_NODEID, MASTER_ADDR
and MASTER_PORT (one node without them). One torchrun per node, started in this very process; statuses: exit_status.py.

SIGUSR2 asks the trainers to save and leave. Before anything starts it is blocked here, and a blocked signal stays
blocked in every process started from here: one that arrives while a trainer still imports waits until that trainer is
ready for it (trainer_side.py), and the helpers of a trainer are not ended by it. A thread here passes it on to the
trainers, for launchers that reach only this process.

What always holds: when this process ends no trainer of the node and no helper of one is left, and
outcomes/attempt-A-node-N.json says why; none of an earlier attempt is left when it begins.
Variables: WATCHDOG_SECONDS (900), WATCHDOG_START_SECONDS (3600); 0 switches the watchdog off.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from pathlib import Path

import psutil

from megatron.run_control.attempts import read_attempts, write_outcome
from megatron.run_control.errors import LaunchError, said
from megatron.run_control.exit_status import HUNG, LOST_PROCESS, SAVED_ON_REQUEST, STOPPED_EARLY, describe
from megatron.run_control.heartbeat import ATTEMPT_VARIABLE, FOLDER_VARIABLE
from megatron.run_control.limits import watchdog_limits
from megatron.run_control.run_folder import FIRST_START_FLAGS, RunFolder
from megatron.run_control.watchdog import Watchdog

SAVE_SIGNAL = signal.SIGUSR2
LEFTOVER_GRACE_S = 5.0


def worker_pids() -> list[int]:
    """The training processes of this node: torchrun's workers are children of this process."""
    return [child.pid for child in psutil.Process().children()]


def leftovers(run: RunFolder, attempt: int) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """What trainers left behind: of this attempt and node helpers (data loaders, checkpoint writers, wandb) whose
    parent was killed, and whatever of earlier attempts on this machine has outlived its killed torchrun. They are known
    by the environment that they inherited from torchrun."""
    of_this: list[psutil.Process] = []
    of_earlier: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            environment = process.environ()
            if "TORCHELASTIC_RUN_ID" not in environment or environment.get(FOLDER_VARIABLE) != str(run.path):
                continue
            number = int(environment[ATTEMPT_VARIABLE])
            if number < attempt:
                of_earlier.append(process)
            elif number == attempt and environment.get("SLURM_NODEID") == os.environ.get("SLURM_NODEID"):
                of_this.append(process)
    return of_this, of_earlier


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def end_earlier(run: RunFolder, attempt: int) -> int:
    """Kill trainers of earlier attempts, which would write the same checkpoints; returns how many there were. The run's
    lock says that no launch of theirs is alive."""
    earlier = leftovers(run, attempt)[1]
    _kill(earlier)
    psutil.wait_procs(earlier, timeout=LEFTOVER_GRACE_S)
    return len(earlier)


def end_leftovers(run: RunFolder, attempt: int) -> None:
    """Give them time to end by themselves, then kill them: they hold the step's output open, and it would idle."""
    _kill(psutil.wait_procs(leftovers(run, attempt)[0], timeout=LEFTOVER_GRACE_S)[1])


def _pass_on_save_signal() -> None:
    while True:
        signal.sigwait({SAVE_SIGNAL})
        for pid in worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SAVE_SIGNAL)


def script_arguments_now(run: RunFolder) -> list[str]:
    """The script's arguments: as launched until an attempt has saved, in a folder that held steps before too (a start
    from an older one, by --ckpt-step); from then on those that go on from the run's own checkpoint."""
    has_saved = any(attempt.step_at_end not in (None, attempt.step_at_start) for attempt in read_attempts(run))
    return run.arguments_now() if has_saved else run.arguments()


def torchrun_arguments(run: RunFolder) -> list[str]:
    """torchrun's own arguments, then the script and its flags."""
    settings = run.settings()
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    arguments = [f"--nnodes={nodes}", f"--nproc-per-node={settings['processes']}", "--max-restarts=0"]
    if nodes == 1 and "MASTER_ADDR" not in os.environ:
        arguments.append("--standalone")
    else:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise LaunchError(f"{name} is not set: scripts/slurm/lib.sh sets it for a run on {nodes} nodes")
        arguments += [
            f"--node-rank={os.environ.get('SLURM_NODEID', '0')}",
            f"--master-addr={os.environ['MASTER_ADDR']}",
            f"--master-port={os.environ['MASTER_PORT']}",
        ]
    return [*arguments, str(Path(settings["repository"]) / settings["script"]), *script_arguments_now(run)]


def run_node(run: RunFolder, attempt: int) -> tuple[int, str]:
    """Run torchrun to its end; returns the exit status and the reason as a sentence."""
    limit, start_limit = watchdog_limits()
    now = script_arguments_now(run)
    if now != run.arguments():
        given = [name for name in FIRST_START_FLAGS if name in run.arguments() and name not in now]
        given += ["--load"] if run.value_of("load") != run.value_of("save") else []
        print(f"> goes on from its own checkpoint of step {run.step()}, not as {', '.join(given)} had it begin")
    watchdog = Watchdog(run, attempt, limit, start_limit, worker_pids)
    arguments = torchrun_arguments(run)
    # 0.5 to 20 s of imports, after everything that can be wrong was looked at.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args as parse_torchrun_arguments
    from torch.distributed.run import run as torchrun

    if limit < math.inf:
        watchdog.start()
    try:
        torchrun(parse_torchrun_arguments(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if watchdog.hung is not None:
            return HUNG, f"hung: {watchdog.hung}"
        if failure.exitcode < 0:
            killed_by = signal.Signals(-failure.exitcode).name
            return LOST_PROCESS, f"rank {rank} (pid {failure.pid}) was killed by {killed_by}"
        if failure.exitcode == SAVED_ON_REQUEST:
            return SAVED_ON_REQUEST, describe(SAVED_ON_REQUEST)
        return failure.exitcode, f"rank {rank}: {describe(failure.exitcode)}"
    except SignalException as error:
        return 128 + error.sigval, f"this node was told to end by {signal.Signals(error.sigval).name}"
    finally:
        watchdog.stop()
    if stopped_by := run.stops_early():
        wanted = run.value_of("train-iters")
        return STOPPED_EARLY, f"stopped by {stopped_by} at step {run.step()} of {wanted}"
    return 0, describe(0)


def main() -> int:
    """Run this node's part of an attempt."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE_SIGNAL})
    signal.signal(SAVE_SIGNAL, signal.SIG_DFL)  # an ignored signal would be dropped instead of kept for later
    threading.Thread(target=_pass_on_save_signal, name="save-signal", daemon=True).start()
    node, attempt = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    try:
        run = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
        if earlier := end_earlier(run, attempt):
            print(f"> node {node}: ended {earlier} processes that an earlier attempt had left behind", file=sys.stderr)
        status, reason = run_node(run, attempt)
    except (LaunchError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        write_outcome(run, attempt, node, status, reason)
    except OSError as error:  # a full disk; the status says what there is to say
        print(f"error: {said(error)}", file=sys.stderr)
    end_leftovers(run, attempt)
    print(f"> node {node}: {reason}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
