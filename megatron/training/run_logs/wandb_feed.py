"""The training side of a wandb run: what upstream's trainer takes for the wandb module, answered without waiting.

    feed = WandbFeed(plan, save=Path("checkpoints"), upload_checkpoints=False)
    feed.log({"lm loss": loss}, step)            # merged into the row of its step
    feed.log_image("streams/read", pixels, step)
    feed.finish()                                # at most the plan's timeout

wandb itself, its import included, lives in one thread that takes whole rows from a queue.

What always holds: no call but `finish` waits; steps never go backwards and none is sent twice (step_mark.py); whatever
wandb raises is one warning.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.training.run_logs.step_mark import StepMark
from megatron.training.run_logs.wandb_checkpoints import CheckpointNote, RunOfCheckpoints
from megatron.training.run_logs.wandb_session import SessionPlan, start_session
from megatron.training.run_logs.warnings_once import warn_once

_WAITING = 4096  # rows and other calls; more means that wandb has stopped taking them
_ROWS_BETWEEN_DISK_CHECKS = 50
_LOW_DISK_BYTES = 1 << 20

Task = Callable[[Any], None]


def _plain(value: Any) -> Any:
    """Return numbers of tensors as numbers."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) in (0, 1) else value


class _Config:
    """Stands where upstream has `wandb.config`."""

    def __init__(self, send: Callable[[Task], None]) -> None:
        self._send = send

    def update(self, values: Mapping[str, Any], allow_val_change: bool = True) -> None:
        """Add to the configuration; a resumed run may change what it said."""
        del allow_val_change
        self._send(lambda run: run.config.update(dict(values), allow_val_change=True))


class WandbFeed:
    """One wandb run, fed from this process.

    Args:
        plan: what the run is started with.
        save: the folder that remembers the last step sent; None forgets.
        upload_checkpoints: whether files of checkpoints are uploaded.
    """

    Artifact = CheckpointNote

    def __init__(self, plan: SessionPlan, save: Path | None, *, upload_checkpoints: bool = False) -> None:
        self._plan = plan
        self._mark = StepMark(save)
        self._row: dict[str, Any] = {}
        self._step = -1
        self._tasks: queue.Queue[Task | None] = queue.Queue(_WAITING)
        self._exit_code = 0
        self._rows = 0
        self.config = _Config(self.send)
        self.run = RunOfCheckpoints(self.send, plan.project, plan.entity, upload=upload_checkpoints)
        self._thread = threading.Thread(target=self._serve, name="wandb-feed", daemon=True)
        self._started = self._given_up = self._finished = False
        self._thread.start()

    def send(self, task: Task) -> None:
        """Have a function of wandb's run called in its thread; dropped, with a warning, where wandb takes nothing."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            warn_once("wandb-full", "wandb: it has stopped taking data; some of this run's steps are not logged there")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Add values to the row of a step; the row goes to wandb when a later step begins."""
        if step < self._step:
            return  # written late, for a row that has gone
        if step > self._step:
            self._send_row()
            self._step = step
        self._row.update({name: _plain(value) for name, value in data.items()})

    def log_image(self, name: str, pixels_hwc: Any, step: int, caption: str = "") -> None:
        """Add an image [height, width, 3] of bytes to the row of a step."""
        self.log({name: _Picture(pixels_hwc, caption)}, step)

    def _send_row(self) -> None:
        row, step = self._row, self._step
        self._row = {}
        if row:
            self.send(lambda run: self._log_row(run, row, step))

    def _log_row(self, run: Any, row: dict[str, Any], step: int) -> None:
        if not self._mark.take(step):
            warn_once(
                "wandb-again",
                f"wandb: this run was told about steps up to {self._mark.last} before; they are not sent again",
            )
            return
        run.log({name: value.wandb() if isinstance(value, _Picture) else value for name, value in row.items()}, step)
        self._rows += 1
        if self._rows % _ROWS_BETWEEN_DISK_CHECKS == 1:
            with contextlib.suppress(OSError):
                if shutil.disk_usage(run.dir).free < _LOW_DISK_BYTES:
                    self._warn(
                        "wandb-disk", f"wandb: the disk of {run.dir} is full; this run's data there is not whole"
                    )

    def _serve(self) -> None:
        """The thread: start wandb, then do what comes, to the end."""
        try:
            run = start_session(self._plan, self._warn)
            self._started = True
        except BaseException as error:
            self._warn("wandb", f"wandb: it cannot be used ({type(error).__name__}: {error}); nothing is logged there")
            run = None
        while (task := self._tasks.get()) is not None:
            if run is None:
                continue
            try:
                task(run)
            except BaseException as error:
                self._warn("wandb", f"wandb: {type(error).__name__}: {error}; some of this run is not logged there")
        if run is not None:
            try:
                run.finish(exit_code=self._exit_code)
            except BaseException as error:
                self._warn("wandb", f"wandb: {type(error).__name__}: {error}; the end of this run is not logged there")

    def finish(self, exit_code: int = 0) -> None:
        """Send what is left and end the run; waits as long as the plan allows. More calls do nothing."""
        if self._finished:
            return
        self._finished = True
        self._exit_code = exit_code
        deadline = time.monotonic() + self._plan.timeout
        self._send_row()
        with contextlib.suppress(queue.Full):
            self._tasks.put(None, timeout=self._plan.timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            kept = f"what it has is in {self._plan.folder}/wandb" if self._started else "this run is not logged there"
            self._warn(
                "wandb-end",
                f"wandb: it was not done {self._plan.timeout:g} s after the end (--wandb-timeout); {kept}. "
                "WANDB_MODE=offline asks no server",
            )
            self._given_up = True

    def _warn(self, topic: str, line: str) -> None:
        """Warn once, and no more when the end of this run has not waited for wandb."""
        if not self._given_up:
            warn_once(topic, line)


class _Picture:
    """An image that becomes wandb's own only in wandb's thread."""

    def __init__(self, pixels_hwc: Any, caption: str) -> None:
        self._pixels_hwc, self._caption = pixels_hwc, caption

    def wandb(self) -> Any:
        """Return a wandb.Image."""
        import wandb

        return wandb.Image(self._pixels_hwc, caption=self._caption or None)
