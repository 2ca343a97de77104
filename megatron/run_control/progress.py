"""How a run is doing, from its folder alone.

    view = read_progress(Path("runs/tiny-gpt-17"))
    view.state        # "running", "waiting", "silent", "finished", "stopped", "prepared", "damaged"
    view.step, view.steps, view.loss, view.tokens_per_second, view.seconds_left, view.saved_step, view.problem

What always holds: reading changes nothing and raises nothing: a folder whose launch.json, flags.txt or attempts.json
cannot be read is "damaged" and its problem names the file; a log or a checkpoint's tracker that cannot is a problem,
the state is what the other files say; a number that the run has not told yet is None; a loss that is not finite is a
problem in every state.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.run_control.attempts import Attempt, left_outcome, read_attempts
from megatron.run_control.errors import LaunchError, printable, said
from megatron.run_control.exit_status import FINISHED
from megatron.run_control.limits import whole_number
from megatron.run_control.run_folder import RunFolder

SILENT_AFTER_S = 120.0
_TAIL_BYTES = 1 << 18
_LARGEST = 1e12  # milliseconds of a step
_RELEASE = "release"  # in a tracker: weights without a step
_STEP = re.compile(r"iteration +(\d+)/ *(\d+) \|")
_TIME = re.compile(r"elapsed time per iteration \(ms\): +([0-9.]+)")
_BATCH = re.compile(r"global batch size: +(\d+)")
# Printed by "{:.6E}", which writes NAN and INF.
_NUMBER = r"([+-]?(?:nan|inf|\d+(?:\.\d*)?(?:E[+-]?\d+)?))(?![\w.])"
_LOSS = re.compile(rf"lm loss: +{_NUMBER}", re.IGNORECASE)
# The trainer leaves a mean that is NaN out of the line and counts the steps that had one.
_NAN_STEPS = re.compile(r"number of nan iterations: +([1-9]\d*)")
_VALIDATION = re.compile(rf"validation loss at iteration +(\d+)\b.*?lm loss value: +{_NUMBER}", re.IGNORECASE)


@dataclass
class Progress:
    """One run. Times are seconds, losses nats per token."""

    name: str
    state: str
    attempts: int = 0
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    saved_step: int | None = None
    saved_ago: float | None = None
    problem: str | None = None


def is_run(path: Path) -> bool:
    """Whether a folder is a launched run's, or may be one that cannot be looked into: its row says why."""
    try:
        return (path / "launch.json").is_file()
    except OSError:
        return True


def find_runs(places: list[Path]) -> list[Path]:
    """The run folders among these places and directly below them, the newest last."""
    found = [path for place in places for path in ([place] if is_run(place) else place.glob("*")) if is_run(path)]
    return sorted(set(found), key=_launched)


def _launched(path: Path) -> float:
    try:
        return (path / "launch.json").stat().st_mtime
    except OSError:  # it has been removed since
        return 0.0


def read_progress(path: Path) -> Progress:
    """Read one run."""
    name = printable(os.fsencode(path.name).decode("utf-8", errors="backslashreplace"))
    view = Progress(name, "prepared")
    try:
        run = RunFolder(path)
        run.settings()
        run.arguments()
        attempts = read_attempts(run)
    except (LaunchError, OSError) as error:
        return Progress(name, "damaged", problem=said(error))
    view.attempts = len(attempts)
    # Neither decides what becomes of the run: what is wrong with them stands beside its state.
    problems = [*_read_log(run, view), *_read_checkpoint(run, view)]
    if attempts:
        _judge(run, attempts, view)
    view.problem = printable("; ".join([*problems, *([view.problem] if view.problem else [])])) or None
    return view


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _read_log(run: RunFolder, view: Progress) -> list[str]:
    """Step, loss and speed from the last step line; returns what is wrong: losses that are not finite, or a line that
    says no usable numbers, which tells nothing of the run itself."""
    length = whole_number(run.value_of("seq-length") or "")
    try:
        text = _tail(run.log)
        return [*_read_step(text, length, view), *_read_validation(text)]
    except OSError as error:
        return [f"{run.log} cannot be read: {error.strerror}"]
    except ValueError as error:
        return [f"{run.log} is damaged: {error}"]


def _read_step(text: str, length: int | None, view: Progress) -> list[str]:
    """Read the last step line; returns which losses are not finite. Raises ValueError, before the view has any of it,
    for a line with a number that no trainer prints."""
    lines = [line for line in text.splitlines() if _STEP.search(line)]
    if not lines:
        return []
    found, duration, batch, loss, nans = (
        pattern.search(lines[-1]) for pattern in (_STEP, _TIME, _BATCH, _LOSS, _NAN_STEPS)
    )
    step, steps = (_whole(found[1]), _whole(found[2])) if found is not None else (0, 0)
    seconds = 0.0 if duration is None else _number(duration[1]) / 1000
    tokens = 0 if batch is None or length is None else _whole(batch[1]) * length
    view.step, view.steps = step, steps
    view.loss = float(loss[1]) if loss is not None else math.nan if nans is not None else None
    if seconds > 0:
        view.tokens_per_second = tokens / seconds if tokens else None
        view.seconds_left = (steps - step) * seconds
    if view.loss is not None and not math.isfinite(view.loss):
        return [f"the loss is not finite ({view.loss}) at step {view.step}"]
    return [] if nans is None else [f"{nans[1]:.20} of the steps up to {view.step} had a loss that is NaN"]


def _read_validation(text: str) -> list[str]:
    """Says it where the last validation loss is not finite."""
    validations = _VALIDATION.findall(text)
    if not validations or math.isfinite(float(validations[-1][1])):
        return []
    return [f"the validation loss is not finite ({float(validations[-1][1])}) at step {validations[-1][0]:.20}"]


def _whole(text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise ValueError(f"{_shortened(text)} is no whole number of a run")
    return number


def _number(text: str) -> float:
    """A number from 0 in digits and points."""
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    if number > _LARGEST:
        raise ValueError(f"{_shortened(text)} is no time of a step")
    return number


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}... ({len(text)} digits)"


def _read_checkpoint(run: RunFolder, view: Progress) -> list[str]:
    """The last saved step and its age; returns what is wrong with it."""
    tracker = run.tracker()
    if tracker is None:
        return ["saves nothing: no --save"]
    try:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        age = time.time() - tracker.stat().st_mtime
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{tracker} cannot be read: {error.strerror}"]
    step = whole_number(text)
    if step is None and text != _RELEASE:
        return [f"{tracker} is damaged: {_shortened(text)} is no step"]
    if step:
        view.saved_step, view.saved_ago = step, age
    return []


def _beat(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # it has been removed since
        return 0.0


def _judge(run: RunFolder, attempts: list[Attempt], view: Progress) -> None:
    """State and problem, from the attempts and the heartbeats."""
    last = attempts[-1]
    if last.ended is not None:
        view.seconds_left = view.tokens_per_second = None
        view.state = "finished" if last.status == FINISHED else "waiting" if last.again else "stopped"
        view.problem = None if last.status == FINISHED else last.reason
        return
    view.state = "running"
    left = left_outcome(run, last.number)
    if left is not None:
        view.seconds_left = view.tokens_per_second = None
        view.state = "finished" if left["status"] == FINISHED else "silent"
        view.problem = None if left["status"] == FINISHED else f"{left['reason']}; its launcher did not go on with it"
        return
    beats = [_beat(file) for file in run.heartbeats.glob("rank-*.json")]
    silence = time.time() - max([last.started, *beats])
    if silence > SILENT_AFTER_S:
        view.state = "silent"
        view.problem = f"no rank has moved for {silence / 60:.0f} min"
    elif len(attempts) > 1:
        view.problem = f"start {last.number}; before: {attempts[-2].reason}"
