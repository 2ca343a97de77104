"""Every start of a run, how it ended, and whether it is started again: the guard.

    number = begin_attempt(run, limit=3)               # GuardError when the guard refuses another start
    decision = end_attempt(run, status, limit=3)       # decision.again, decision.reason

The guard counts the attempts in a row that ended at the step at which they began. When `limit` of them have, the run is
stopped and the reason says how each ended. An attempt whose end was never written (its node failed, or the whole job
was killed) counts like any other.

What always holds: what is decided depends on attempts.json, outcomes/ and the checkpoint tracker alone, so that a job
which Slurm requeued by itself and one that requeued itself are judged alike.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.run_control.errors import GuardError, LaunchError
from megatron.run_control.exit_status import BAD_OPTIONS, FINAL, FINISHED, STOPPED_EARLY, describe
from megatron.run_control.limits import DEFAULT_RESTARTS
from megatron.run_control.run_folder import RunFolder, read_json, write_whole

WITHOUT_A_WORD = "ended without a word: its node failed, or the whole job was killed or cancelled"


@dataclass
class Attempt:
    """One start. `ended` is None while it runs; times are Unix seconds."""

    number: int
    started: float
    step_at_start: int
    host: str
    job: str | None
    ended: float | None = None
    step_at_end: int | None = None
    status: int | None = None
    reason: str | None = None
    again: bool | None = None  # whether it was decided to start again


_KINDS = {
    "number": int,
    "started": int | float,
    "step_at_start": int,
    "host": str,
    "job": str | None,
    "ended": int | float | None,
    "step_at_end": int | None,
    "status": int | None,
    "reason": str | None,
    "again": bool | None,
}
_LARGEST = 1e15  # of a step, and of a time in seconds; NaN is no number either


@dataclass(frozen=True)
class Decision:
    """Whether the run is started again, and why, as a sentence for its log."""

    again: bool
    status: int
    reason: str


def read_attempts(run: RunFolder) -> list[Attempt]:
    """All attempts, oldest first. Raises LaunchError where the file is damaged."""
    entries = read_json(run.attempts, [])
    try:
        if not isinstance(entries, list):
            raise TypeError
        attempts = [Attempt(**entry) for entry in entries]
    except TypeError:
        raise LaunchError(f"{run.attempts} is damaged: it is no list of attempts") from None
    for attempt in attempts:
        for name, kinds in _KINDS.items():
            value = getattr(attempt, name)
            usable = isinstance(value, kinds) and (not isinstance(value, int | float) or abs(value) <= _LARGEST)
            if not usable:
                raise LaunchError(f"{run.attempts} is damaged: {name} is {value!r:.80}")
    return attempts


def _write(run: RunFolder, attempts: list[Attempt]) -> None:
    write_whole(run.attempts, json.dumps([asdict(attempt) for attempt in attempts], indent=1) + "\n")


def attempts_without_progress(attempts: list[Attempt], step: int) -> list[Attempt]:
    """The last attempts in a row that began at the step that is still the last saved one."""
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.step_at_start != step or attempt.status == FINISHED:
            break
        found.insert(0, attempt)
    return found


def _refusal(run: RunFolder, attempts: list[Attempt], limit: int) -> str | None:
    """The reason why the guard stops the run, None where it does not."""
    stuck = attempts_without_progress(attempts, run.step())
    if len(stuck) < limit:
        return None
    ends = "; ".join(f"{attempt.number}: {attempt.reason}" for attempt in stuck)
    return (
        f"{len(stuck)} attempts in a row ended without a new checkpoint (still at step {run.step()}): {ends}. "
        f"See {run.log}; when the cause is mended start it again with RESET_GUARD=1 {shlex.quote(str(run.rerun))}"
    )


def begin_attempt(run: RunFolder, limit: int = DEFAULT_RESTARTS, reset: bool = False) -> int:
    """Record a start; returns its number, from 1. Raises GuardError when the guard stops the run."""
    attempts = read_attempts(run)
    if attempts and attempts[-1].ended is None:
        last = attempts[-1]
        last.ended, last.step_at_end, last.reason = time.time(), run.step(), WITHOUT_A_WORD
        if (left := left_outcome(run, last.number)) is not None:  # its launcher was killed, its trainers were not
            last.ended, last.status, last.reason = left["time"], left["status"], left["reason"]
        _write(run, attempts)
    refusal = _refusal(run, attempts, limit)
    if refusal is not None:
        if not reset:
            raise GuardError(f"not started: {refusal}")
        for attempt in attempts:
            attempt.step_at_start = -1  # seen and pardoned
    number = len(attempts) + 1
    attempts.append(Attempt(number, time.time(), run.step(), socket.gethostname(), os.environ.get("SLURM_JOB_ID")))
    _write(run, attempts)
    return number


def write_outcome(run: RunFolder, attempt: int, node: int, status: int, reason: str) -> None:
    """Record how the processes of one node ended."""
    outcome = {"time": time.time(), "status": status, "reason": reason}
    write_whole(run.outcomes / f"attempt-{attempt}-node-{node}.json", json.dumps(outcome) + "\n")


def _read_outcome(file: Path) -> dict[str, Any]:
    """What a node wrote. Raises LaunchError where the file is damaged."""
    outcome = read_json(file, None)
    kinds = {"time": int | float, "status": int, "reason": str}
    if not isinstance(outcome, dict) or not all(isinstance(outcome.get(name), kind) for name, kind in kinds.items()):
        raise LaunchError(f"{file} is damaged: it has no time, status and reason")
    return outcome


def _first_outcome(run: RunFolder, attempt: int, *, warns: bool = True) -> dict[str, Any] | None:
    """The outcome of the node that ended first without success: what the others ended of is its consequence. A damaged
    one does not keep the end of the attempt from being written: it is said in the log and left out."""
    outcomes = []
    for file in sorted(run.outcomes.glob(f"attempt-{attempt}-node-*.json")):
        try:
            outcomes.append(_read_outcome(file))
        except LaunchError as error:
            if not warns:
                continue
            print(f"warning: {error}; the status of the step counts in its place", file=sys.stderr)
    failed = [outcome for outcome in outcomes if outcome["status"] != FINISHED]
    return min(failed, key=lambda outcome: outcome["time"], default=None)


def left_outcome(run: RunFolder, attempt: int) -> dict[str, Any] | None:
    """How an attempt ended whose end nobody recorded, by what its nodes wrote; None where none did."""
    return _first_outcome(run, attempt, warns=False) or _finished_outcome(run, attempt)


def _finished_outcome(run: RunFolder, attempt: int) -> dict[str, Any] | None:
    """Node 0's outcome where it is a success: no node of a run succeeds alone."""
    file = run.outcomes / f"attempt-{attempt}-node-0.json"
    try:
        outcome = _read_outcome(file) if file.exists() else None
    except LaunchError:
        return None
    return outcome if outcome is not None and outcome["status"] == FINISHED else None


def end_attempt(run: RunFolder, status: int, limit: int = DEFAULT_RESTARTS, cancelled: bool = False) -> Decision:
    """Record the end of the last attempt, whose step (srun) or node (torchrun) ended with `status`, and decide."""
    attempts = read_attempts(run)
    if not attempts:
        raise LaunchError(f"{run.path} has no attempt that could end: begin one first")
    last = attempts[-1]
    outcome = _first_outcome(run, last.number)
    reason = describe(status)
    if status != FINISHED and outcome is not None:
        status, reason = outcome["status"], outcome["reason"]
    last.ended, last.step_at_end, last.status, last.reason = time.time(), run.step(), status, reason
    decision = _decision(run, attempts, limit, cancelled)
    last.again = decision.again
    if not decision.again:
        last.reason = decision.reason
    _write(run, attempts)
    return decision


def _decision(run: RunFolder, attempts: list[Attempt], limit: int, cancelled: bool) -> Decision:
    """What follows from the end of the last attempt."""
    status, reason = attempts[-1].status or 0, attempts[-1].reason
    if status == FINISHED:
        return Decision(False, status, "finished")
    if status in FINAL:
        how = (
            f"{reason}; not started again, because another start cannot mend that: the error stands in {run.log}, and "
        )
        return Decision(False, BAD_OPTIONS, f"{how}when its cause is gone {shlex.quote(str(run.rerun))} goes on")
    if status == STOPPED_EARLY:
        return Decision(False, status, f"{reason}; goes on with {shlex.quote(str(run.rerun))}")
    if cancelled:
        return Decision(False, status, f"{reason}; not started again, because it was cancelled")
    refusal = _refusal(run, attempts, limit)
    if refusal is not None:
        return Decision(False, status, refusal)
    return Decision(True, status, f"{reason}; goes on from step {run.step()}")
