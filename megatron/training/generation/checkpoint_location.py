"""Finds a checkpoint for generation, as the trainer does (megatron/training/resume).

    location = find_checkpoint("runs/mine/checkpoints")           # the step that the tracker file names
    location = find_checkpoint("runs/mine/checkpoints", step=50)

What always holds: what is returned is there, whole and of a known format; everything else is a GenerationError that
names what was looked for and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.training.generation.errors import GenerationError
from megatron.training.resume import completeness, location
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import CheckpointLocation

__all__ = ["CheckpointLocation", "checkpoint_errors", "find_checkpoint"]


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Turn a CheckpointError into a GenerationError of the same words."""
    try:
        yield
    except CheckpointError as error:
        raise GenerationError(str(error)) from error


def find_checkpoint(load: str | Path, step: int | None = None) -> CheckpointLocation:
    """Return where the checkpoint is; step None takes the one that the tracker file names.

    Raises:
        GenerationError: no such folder, no or a broken tracker file, a step that is not there or not whole.
    """
    with checkpoint_errors():
        found = location.find_checkpoint(load, step)
        completeness.require_whole(found)
        return found
