"""Runs Python scripts from a process that has the trainer imported already: a start costs 0.1 s of CPU instead of 5.

    status = run_preloaded(["pretrain_gpt.py", *options], environment, folder, log)
    status = run_preloaded_ranks(2, ["pretrain_gpt.py", *options], environment, folder, log)

Most of a short run is imports. The fork server of `multiprocessing` imports them once per test worker; a script is then
a forked process with the arguments, environment, folder and output that it is given, and ends like one that was started
by itself: exit handlers run, an uncaught error is a traceback and status 1.

What always holds: a script is run as `__main__` from its own file, by the modules that it would import; an environment
that would import others is refused. What tests start, kill or stop as a user does, and what launchers and Slurm start,
are processes that import for themselves.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_SERVER = {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(HERE)}  # what it is started with
_STARTING = threading.Lock()


def can_preload(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment imports what the server has: on a CPU host, with one thread."""
    device = environment.get("MEGATRON_DEVICE", "auto")
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    return on_cpu and environment.get("OMP_NUM_THREADS") == "1"


def run_preloaded(command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> int:
    """Run a script, [file, *arguments], in `folder`; its exit status. What it prints goes to the file `log`."""
    return _run(command, [environment], folder, log)


def run_preloaded_ranks(
    processes: int, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
) -> int:
    """Run a script as the ranks of one node; 0, or the first other exit status, upon which the other ranks are killed.

    The ranks meet at a store of this process, which outlives them as torchrun's does.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return _run(command, [{**environment, **shared, **rank} for rank in ranks], folder, log)


def _run(command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path, log: Path) -> int:
    with _STARTING:
        context = _context()
    processes = []
    for environment in environments:
        assert can_preload(environment), "start a process for this environment"
        what = list(command), dict(environment), str(folder), str(log), multiprocessing.get_start_method()
        processes.append(context.Process(target=_become, args=what))
        processes[-1].start()
    return _wait(processes)


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness_preloaded_imports"])
    with _environment(_SERVER):
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(processes: Sequence[BaseProcess]) -> int:
    """Until all have ended: 0 or the first other status."""
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    status = 0
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode and not status:
                status = ended.exitcode
                for process in running.values():
                    process.kill()
    return status


def _become(command: list[str], environment: dict[str, str], folder: str, log: str, start_method: str) -> None:
    """What the forked process runs: the script."""
    import atexit
    import runpy

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    assert "megatron.training.training" in sys.modules, f"the server could not import {HERE}/harness_preloaded_imports"
    multiprocessing.set_start_method(start_method, force=True)  # the script's own choice, not the server's
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    sys.path[:] = [str(Path(command[0]).resolve().parent), *(p for p in sys.path if Path(p).resolve() != HERE)]
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # which a child of multiprocessing leaves out
