"""The last step that the wandb run of a save folder was told about, so that none is told twice.

    mark = StepMark(Path(args.save))       # StepMark(None) forgets when the process ends
    if mark.take(step): run.log(row, step=step)

A run that is killed and goes on from its last checkpoint computes the steps since then again, to the same values.
wandb's history only grows: online it refuses an earlier step, and two offline runs of one id would both hold it.

What always holds: a step is written down before it is sent, so a kill can leave a gap of one step, never a step twice.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatron.run_control.run_folder import write_whole

STEP_FILE = "wandb_last_step.txt"


class StepMark:
    """The mark of one save folder; one process writes it."""

    def __init__(self, save: Path | None) -> None:
        self._file = None if save is None else save / STEP_FILE
        self.last = self._stored()

    def _stored(self) -> int:
        try:
            return int(self._file.read_text()) if self._file is not None else -1
        except (OSError, ValueError):
            return -1

    def take(self, step: int) -> bool:
        """Return whether the step is later than every one before, and remember it."""
        if step <= self.last:
            return False
        self.last = step
        if self._file is not None:
            with suppress(OSError):  # the save folder's trouble is the checkpoint's to report
                write_whole(self._file, f"{step}\n")
        return True
