"""How a run is doing, from its folder alone.

    view = read_progress(Path("runs/tiny-gpt-17"))
    view.state        # "running", "waiting", "silent", "finished", "stopped", "prepared", "damaged"
    view.step, view.steps, view.loss, view.tokens_per_second, view.seconds_left, view.saved_step, view.problem

What always holds: reading changes nothing and raises nothing: a folder that cannot be read is "damaged" and its problem
names the file; a number that the run has not told yet is None; a loss that is not finite is a problem in every state.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.run_control.attempts import Attempt, read_attempts
from megatron.run_control.exit_status import FINISHED
from megatron.run_control.run_folder import TRACKER, RunFolder

SILENT_AFTER_S = 120.0
_TAIL_BYTES = 1 << 18
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
    """Whether a folder is a launched run's."""
    return (path / "launch.json").is_file()


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
    name = os.fsencode(path.name).decode("utf-8", errors="backslashreplace")
    view = Progress(name, "prepared")
    try:
        run = RunFolder(path)
        run.settings()
        attempts = read_attempts(run)
        view.attempts = len(attempts)
        problems = _read_log(run, view)
        _read_checkpoint(run, view)
        if attempts:
            _judge(run, attempts, view)
    except (OSError, ValueError) as error:  # LaunchError is a ValueError
        return Progress(name, "damaged", problem=str(error))
    view.problem = "; ".join([*problems, *([view.problem] if view.problem else [])]) or None
    return view


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _read_log(run: RunFolder, view: Progress) -> list[str]:
    """Step, loss and speed from the last step line; returns which losses are not finite."""
    text = _tail(run.log)
    lines = [line for line in text.splitlines() if _STEP.search(line)]
    if not lines:
        return []
    step, duration, batch, loss, nans = (
        pattern.search(lines[-1]) for pattern in (_STEP, _TIME, _BATCH, _LOSS, _NAN_STEPS)
    )
    if step is not None:
        view.step, view.steps = int(step[1]), int(step[2])
    view.loss = float(loss[1]) if loss is not None else math.nan if nans is not None else None
    length = run.value_of("seq-length")
    if duration is not None and float(duration[1]) > 0:
        seconds = float(duration[1]) / 1000
        if batch is not None and length is not None:
            view.tokens_per_second = int(batch[1]) * int(length) / seconds
        if view.step is not None and view.steps is not None:
            view.seconds_left = (view.steps - view.step) * seconds
    problems = []
    if view.loss is not None and not math.isfinite(view.loss):
        problems.append(f"the loss is not finite ({view.loss}) at step {view.step}")
    elif nans is not None:
        problems.append(f"{nans[1]} of the steps up to {view.step} had a loss that is NaN")
    validations = _VALIDATION.findall(text)
    if validations and not math.isfinite(float(validations[-1][1])):
        problems.append(f"the validation loss is not finite ({float(validations[-1][1])}) at step {validations[-1][0]}")
    return problems


def _read_checkpoint(run: RunFolder, view: Progress) -> None:
    save = run.value_of("save")
    if save is None:
        view.problem = "saves nothing: no --save"
        return
    view.saved_step = run.step() or None
    if view.saved_step is not None:
        view.saved_ago = time.time() - (Path(save) / TRACKER).stat().st_mtime


def _judge(run: RunFolder, attempts: list[Attempt], view: Progress) -> None:
    """State and problem, from the attempts and the heartbeats."""
    last = attempts[-1]
    if last.ended is not None:
        view.seconds_left = view.tokens_per_second = None
        view.state = "finished" if last.status == FINISHED else "waiting" if last.again else "stopped"
        view.problem = None if last.status == FINISHED else last.reason
        return
    view.state = "running"
    beats = [file.stat().st_mtime for file in run.heartbeats.glob("rank-*.json")]
    silence = time.time() - max([last.started, *beats])
    if silence > SILENT_AFTER_S:
        view.state = "silent"
        view.problem = f"no rank has moved for {silence / 60:.0f} min"
    elif len(attempts) > 1:
        view.problem = f"start {last.number}; before: {attempts[-2].reason}"
