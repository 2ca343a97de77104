"""What a training process tells the watchdog: that it moves, and, when asked, where it stands.

    heartbeat = join_run()            # None outside a launched run (no MEGATRON_RUN_FOLDER)
    forward_step = beating(forward_step, heartbeat)

A launched process writes heartbeats/rank-N.json (pid, host, attempt) and touches it at most every `INTERVAL` seconds as
its forward steps go by, training and evaluation alike. SIGUSR1 makes it write the Python stack of every thread to
stacks/attempt-A-rank-N.txt; that is C code of faulthandler, so it works while Python itself waits in a collective.

What always holds: outside a launched run nothing happens; a heartbeat never raises into the training loop.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.run_control.run_folder import RunFolder, write_whole

FOLDER_VARIABLE = "MEGATRON_RUN_FOLDER"
ATTEMPT_VARIABLE = "MEGATRON_RUN_ATTEMPT"
DUMP_SIGNAL = signal.SIGUSR1
INTERVAL = 2.0


class Heartbeat:
    """The heartbeat file of this process."""

    def __init__(self, run: RunFolder, rank: int, attempt: int) -> None:
        self._file = run.heartbeats / f"rank-{rank}.json"
        self._last = 0.0
        about = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "attempt": attempt, "beats": False}
        self._about = about
        write_whole(self._file, json.dumps(about) + "\n")

    def beat(self) -> None:
        """Say that this process moves."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return
        self._last = now
        try:
            if self._about["beats"]:
                os.utime(self._file, (time.time(), time.time()))
            else:
                self._about["beats"] = True  # the watchdog's longer limit for starts no longer holds
                write_whole(self._file, json.dumps(self._about) + "\n")
        except OSError:
            pass  # a full or absent file system is the checkpoint's concern, not the heartbeat's


@functools.cache
def join_run() -> Heartbeat | None:
    """Announce this process to its run, once however often it is called; None outside a launched run."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return None
    run, rank = RunFolder(Path(folder)), int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
    stack_file(run, attempt, rank).parent.mkdir(parents=True, exist_ok=True)
    # Open for the whole life of the process: faulthandler keeps the descriptor.
    faulthandler.register(DUMP_SIGNAL, stack_file(run, attempt, rank).open("a"), all_threads=True)
    return Heartbeat(run, rank, attempt)


def stack_file(run: RunFolder, attempt: int, rank: int) -> Path:
    """Where a rank's stacks of an attempt go."""
    return run.stacks / f"attempt-{attempt}-rank-{rank}.txt"


def beating[**P, R](function: Callable[P, R], heartbeat: Heartbeat | None) -> Callable[P, R]:
    """The function, with a beat before every call."""
    if heartbeat is None:
        return function

    @functools.wraps(function)
    def with_beat(*args: Any, **kwargs: Any) -> R:
        heartbeat.beat()
        return function(*args, **kwargs)

    return with_beat
