"""A folder of checkpoints that appears all at once: written beside its place, renamed into it, or not there at all.

    with new_checkpoint(Path("runs/wide/checkpoints"), iteration=100, overwrite=False) as folder:
        ...                                    # write into folder: iter_0000100, inside the folder that is being made

What always holds: until everything, the tracker included, is on the disk, nothing has the wanted name. An error, ^C or
SIGTERM removes what was written; what SIGKILL leaves is hidden beside the place, no checkpoint, and removed by the next
conversion to that place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.resume.location import RELEASE, TRACKER


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_left_overs(target: Path) -> None:
    """Remove what killed conversions to this place have left."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(?:partial|old)-(\d+)")
    for entry in target.parent.iterdir():
        found = pattern.fullmatch(entry.name)
        if found and not _alive(int(found[1])):
            shutil.rmtree(entry, ignore_errors=True)


def check_output(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise ConversionError when a checkpoint cannot be written to this place."""
    if source is not None and target.resolve() == source.resolve():
        raise ConversionError(f"--output {target} is the checkpoint that is read: give another folder")
    if target.exists() and not target.is_dir():
        raise ConversionError(f"--output {target} is a file: give a folder that is not there yet")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ConversionError(f"--output {target} is there already: give another folder, or --overwrite")


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block as ^C does, so that it cleans up."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def new_checkpoint(target: Path, iteration: int | None, *, overwrite: bool, room: int = 0) -> Iterator[Path]:
    """Yield the folder to write a step into; when the block ends well, target is there with it and its tracker.

    Args:
        target: what a run gives as --load.
        iteration: the step, None for a release.
        overwrite: replace what is there.
        room: bytes that will be written; checked before.

    Raises:
        ConversionError: the place is taken, or the disk has no room.
    """
    check_output(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_overs(target)
    free = shutil.disk_usage(target.parent).free
    if room > free:
        raise ConversionError(f"{room:,} bytes are wanted for {target}, {free:,} are free there")
    staged = target.parent / f".{target.name}.partial-{os.getpid()}"
    step = RELEASE if iteration is None else f"iter_{iteration:07d}"
    try:
        with _terminated_as_interrupt():
            folder = staged / step
            folder.mkdir(parents=True)
            yield folder
            (staged / TRACKER).write_text(RELEASE if iteration is None else str(iteration))
            for path in (staged / TRACKER, *(file for file in folder.rglob("*") if file.is_file()), folder, staged):
                _sync(path)
            _take_place(staged, target)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConversionError(f"the disk of {target} is full; nothing was left there") from error
        raise ConversionError(f"{target} cannot be written: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _take_place(staged: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(staged, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
