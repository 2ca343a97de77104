"""A folder of checkpoints that appears all at once: written beside its place, renamed into it, or not there at all.

    with new_checkpoint(Path("runs/wide/checkpoints"), iteration=100, overwrite=False) as folder:
        ...                                    # write into folder: iter_0000100, inside the folder that is being made

A place that is a symbolic link is the folder that it points to: the link stays and leads to the result.

What always holds: until everything, the tracker included, is on the disk, nothing has the wanted name. An error, ^C or
SIGTERM removes what was written; what SIGKILL leaves is hidden beside the place, no checkpoint, and removed by the next
conversion to that place. What --overwrite replaces changes places with the result in one step where the system can (on
Linux); elsewhere a SIGKILL between two renames leaves it hidden and whole, and the next conversion to that place gives
it its name back before anything else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.resume.location import RELEASE, TRACKER

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of linux/fcntl.h and linux/fs.h."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _at_work(pid: int) -> bool:
    """Whether another process of this number is there; it may be the conversion that made a folder."""
    if pid == os.getpid():  # the folder is older than this process
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _left_overs(target: Path, kind: str) -> list[Path]:
    """Return what killed conversions to this place have left: `partial` results, or an `old` folder moved aside."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-(\d+)")
    if not target.parent.is_dir():
        return []
    found = [(entry, pattern.fullmatch(entry.name)) for entry in target.parent.iterdir()]
    return sorted(entry for entry, match in found if match and not _at_work(int(match[1])))


def _remove(entry: Path) -> None:
    if entry.is_symlink():
        entry.unlink(missing_ok=True)
    else:
        shutil.rmtree(entry, ignore_errors=True)


def _real(path: Path, option: str = "--output") -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ConversionError(f"{option} {path} leads nowhere: {error}") from error


def restore_replaced(target: Path) -> None:
    """Give a folder its name back that a killed --overwrite had moved aside, and say so on standard error.

    Raises:
        ConversionError: it cannot be renamed.
    """
    target = _real(target)
    try:
        if os.path.lexists(target) or not (old := _left_overs(target, "old")):
            return
        os.rename(old[-1], target)
    except OSError as error:
        raise ConversionError(f"--output {target} cannot be written: {error.strerror or error}") from error
    print(
        f"> {target} is there again: a conversion that was to replace it had been killed", file=sys.stderr, flush=True
    )


def _holds(outer: Path, inner: Path) -> bool:
    """Whether one resolved path is the other or above it, by name or as the same folder (mounted twice)."""
    if inner == outer or outer in inner.parents:
        return True
    return outer.exists() and any(folder.exists() and folder.samefile(outer) for folder in (inner, *inner.parents))


def check_apart(target: Path, source: Path) -> None:
    """Raise ConversionError when the output is the input, inside it, or around it; links are followed.

    What the source itself links to (steps kept on another disk, files of a cache) counts as a part of it.
    """
    place, read = _real(target), _real(source, "--input")
    try:
        if place == read or (place.exists() and read.exists() and place.samefile(read)):
            raise ConversionError(f"--output {target} is the checkpoint that is read: give another folder")
        linked = [_real(entry, "--input") for entry in read.iterdir() if entry.is_symlink()] if read.is_dir() else []
        for part in (read, *linked):
            if _holds(part, place):
                raise ConversionError(f"--output {target} is inside --input {source}: give a folder outside it")
            if _holds(place, part):
                raise ConversionError(f"--output {target} holds --input {source}: give a folder that does not")
    except OSError as error:
        raise ConversionError(f"--output {target} and --input {source}: {error.strerror or error}") from error


def check_above(target: Path) -> None:
    """Raise ConversionError when a place is below a file."""
    place = _real(target)
    try:
        above = next((folder for folder in place.parents if folder.exists()), place.parent)
        if not above.is_dir():
            raise ConversionError(f"--output {target} cannot be made: {above} is a file")
    except OSError as error:
        raise ConversionError(f"--output {target} cannot be written: {error.strerror or error}") from error


def check_output(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise ConversionError when a checkpoint cannot be written to this place."""
    if source is not None:
        check_apart(target, source)
    check_above(target)
    place = _real(target)
    try:
        if place.exists() and not place.is_dir():
            raise ConversionError(f"--output {target} is a file: give a folder that is not there yet")
        if place.is_dir() and any(place.iterdir()) and not overwrite:
            raise ConversionError(f"--output {target} is there already: give another folder, or --overwrite")
    except OSError as error:
        raise ConversionError(f"--output {target} cannot be written: {error.strerror or error}") from error


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


def _make_room(target: Path, room: int) -> None:
    """Make the folder above a place, remove what was left there, and see that the disk has room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in (*_left_overs(target, "partial"), *_left_overs(target, "old")):
        _remove(entry)
    free = shutil.disk_usage(target.parent).free
    if room > free:
        raise ConversionError(f"{room:,} bytes are wanted for {target}, {free:,} are free there")


@contextmanager
def new_checkpoint(target: Path, iteration: int | None, *, overwrite: bool, room: int = 0) -> Iterator[Path]:
    """Yield the folder to write a step into; when the block ends well, target is there with it and its tracker.

    Args:
        target: what a run gives as --load.
        iteration: the step, None for a release.
        overwrite: replace what is there.
        room: bytes that will be written; checked before.

    Raises:
        ConversionError: the place is taken or cannot be made, or the disk has no room.
    """
    restore_replaced(target)
    check_output(target, overwrite)
    target = _real(target)
    staged = target.parent / f".{target.name}.partial-{os.getpid()}"
    step = RELEASE if iteration is None else f"iter_{iteration:07d}"
    try:
        _make_room(target, room)
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


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step; returns False, with nothing changed, where that is not offered."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _exchange_by_renames(staged: Path, target: Path) -> None:
    """Do the same in three renames, for file systems without it; between the first two, target has no name."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    try:
        os.rename(target, old)
        os.rename(staged, target)
        os.rename(old, staged)
    except BaseException:
        if old.exists():
            if target.exists():
                _remove(old)
            else:
                os.rename(old, target)
        raise


def _take_place(staged: Path, target: Path) -> None:
    if not target.exists():
        os.rename(staged, target)
    elif not _exchange(staged, target):
        _exchange_by_renames(staged, target)
    _sync(target.parent)
    shutil.rmtree(staged, ignore_errors=True)  # what was there before
