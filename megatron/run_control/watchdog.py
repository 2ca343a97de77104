"""Finds ranks of this node that make no progress, keeps where they stood, and ends them.

    watchdog = Watchdog(run, attempt, limit_s=900, start_limit_s=3600, workers=pids_of_the_trainers)
    watchdog.start()          # a thread
    watchdog.hung             # why it stepped in, or None

A rank hangs when its heartbeat file is older than `limit_s`, or when it has not begun its first step `start_limit_s`
after the launch. One stuck rank stops all others in the next collective, so every node's watchdog finds its ranks
silent within about a step of each other; each waits `GRACE_S` after its own stack dump before it kills, so that the
other nodes' ranks are still there to be dumped.

What always holds: every rank of the node leaves a stack file, also a stopped one (its kernel state is written for it);
after that all ranks of the node are dead, so that torchrun ends and the job does not idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.run_control.heartbeat import DUMP_SIGNAL, stack_file
from megatron.run_control.run_folder import RunFolder

GRACE_S = 15.0


class Watchdog(threading.Thread):
    """The watching thread of one node. `workers` returns the pids of the node's training processes."""

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        limit_s: float,
        start_limit_s: float,
        workers: Callable[[], Iterable[int]],
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.hung: str | None = None
        self._run = run
        self._attempt = attempt
        self._limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._workers = workers
        self._launched = time.time()
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread; what has ended by itself needs no watching."""
        self._ended.set()

    def run(self) -> None:
        """Look at the heartbeats until stopped."""
        while not self._ended.wait(min(5.0, self._limit_s / 4, self._start_limit_s / 4)):
            ranks = self._ranks()
            silent = [text for rank, pid in ranks.items() if (text := self._silence(rank, pid)) is not None]
            missing = set(self._workers()) - set(ranks.values())
            if missing and time.time() - self._launched > self._start_limit_s:
                silent.append(f"processes {sorted(missing)} never joined the run")
            if silent:
                self.hung = "; ".join(silent)
                self._dump_and_kill(ranks)
                return

    def _ranks(self) -> dict[int, int]:
        """{rank: pid} of this node's training processes of this attempt."""
        workers = set(self._workers())
        found = {}
        for file in self._run.heartbeats.glob("rank-*.json"):
            about = _read(file)
            ours = about.get("attempt") == self._attempt and about.get("host") == socket.gethostname()
            if ours and about.get("pid") in workers:
                found[about["rank"]] = about["pid"]
        return found

    def _silence(self, rank: int, pid: int) -> str | None:
        """Why this rank counts as hung, None where it does not."""
        file = self._run.heartbeats / f"rank-{rank}.json"
        try:
            age = time.time() - file.stat().st_mtime
        except OSError:
            return None
        began = _read(file).get("beats", False)
        limit = self._limit_s if began else self._start_limit_s
        if age <= limit:
            return None
        what = f"no forward step for {age:.0f} s" if began else f"no first step {age:.0f} s after its start"
        return f"rank {rank} (pid {pid}, {process_state(pid)}): {what}, the limit is {limit:.0f} s"

    def _dump_and_kill(self, ranks: dict[int, int]) -> None:
        print(f"watchdog: {self.hung}", file=sys.stderr, flush=True)
        for rank, pid in ranks.items():
            file = stack_file(self._run, self._attempt, rank)
            with file.open("a") as out:
                print(f"watchdog: {time.ctime()}: rank {rank}, pid {pid}, {process_state(pid)}", file=out)
            _signal(pid, DUMP_SIGNAL)
        print(f"watchdog: stacks of ranks {sorted(ranks)} are in {self._run.stacks}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S / 2)
        for pid in ranks.values():
            # A stopped process writes its stack when it goes on. Sooner, it would train on, and the other nodes, which
            # wait for the silence of their own ranks, would see none; later, their kill would cut it off.
            _signal(pid, signal.SIGCONT)
        time.sleep(GRACE_S / 2)
        for pid in self._workers():
            _signal(pid, signal.SIGKILL)


def _read(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def process_state(pid: int) -> str:
    """What the kernel says of a process, for example "S (sleeping), waits in futex_wait"."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        state = next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
    except (OSError, StopIteration):
        return "gone"
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        where = ""
    return f"{state}, waits in {where}" if where not in ("", "0") else state
