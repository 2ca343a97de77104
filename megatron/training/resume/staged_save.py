"""Upstream's save_checkpoint, killed at any moment without loss: written aside, judged, moved into place, then named.

Upstream writes into the folder that the checkpoint will have, over what may be there, then opens the tracker file for
writing, which empties it. There is no seam for the place. Here a save goes through these steps:

    1. everything, the tracker file too, is written below SAVE/unfinished_save
    2. what was written is judged whole (completeness.py)
    3. its folder is renamed to SAVE/iter_N; one of that name that is there already is exchanged for it
    4. SAVE's tracker file is replaced by rename
    5. --keep-last and --save-retain-interval: older steps are renamed away, then removed

What always holds: the step that the tracker names is whole and in place before and after every one of them; a save that
fails is a CheckpointError, and leaves what was there. An asynchronous save (--async-save) does 2 to 5 when its writers
have finished.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from megatron.cpu.replacements import Replacements
from megatron.patches import UpstreamPatch
from megatron.training.resume.completeness import damage_of, is_whole
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import (
    RELEASE,
    TRACKER,
    UNFINISHED,
    find_checkpoint,
    saved_steps,
    step_folder,
    tracked_step,
)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A disk with less room than this is taken for the reason of a failed save.
_FULL_DISK_BYTES = 1 << 20


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _sync(folder: Path) -> None:
    """Make the renames in a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders take each other's name in one step; where the file system cannot, in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    aside = one.with_name(f"{one.name}.replaced")
    os.rename(other, aside)
    os.rename(one, other)


def write_tracker(save: Path, stage: Path, step: int | None) -> None:
    """Let the tracker file name a step (None: a release), by rename from the stage."""
    beside = stage / f"{TRACKER}.new"
    with beside.open("w") as stream:
        stream.write(RELEASE if step is None else str(step))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, save / TRACKER)
    _sync(save)


def expired_steps(save: Path, current: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Return the steps before `current` that may go, now that it is whole and in place.

    With keep_last N all before the N latest whole ones; with upstream's --save-retain-interval the multiples stay, and
    without keep_last only the step before goes.
    """
    older = [step for step in saved_steps(save) if step < current]
    expired = older[-1:] if retain_interval is not None else []
    if keep_last is not None:
        whole = [current]
        for step in reversed(older):
            if len(whole) == keep_last:
                break
            if is_whole(save, step):
                whole.append(step)
        expired = [step for step in older if step < whole[-1]] if len(whole) == keep_last else []
    return [step for step in expired if retain_interval is None or step % retain_interval]


def _remove_expired(save: Path, stage: Path, step: int, args: Namespace) -> None:
    for old in expired_steps(save, step, args.keep_last, args.save_retain_interval):
        folder = step_folder(save, old)
        if folder.is_symlink():
            print(f"> {folder} is a symbolic link: kept", flush=True)
            continue
        os.rename(folder, stage / f"{folder.name}.old")  # never half of one under its own name
        print(f"> removed {folder}", flush=True)


class _Save:
    """One save: where it is written, and how it gets into place."""

    def __init__(self, args: Namespace, iteration: int, release: bool) -> None:
        self.args = args
        self.save = Path(args.save)
        self.step = None if release else int(iteration)
        self.stage = self.save / UNFINISHED / step_folder(Path(), self.step).name
        self._announce: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Make an empty place to write to."""
        if _is_first_rank():
            # What an asynchronous save still writes stays; nothing else can be in the works.
            shutil.rmtree(self.stage if self.args.async_save else self.stage.parent, ignore_errors=True)
            self.stage.mkdir(parents=True, exist_ok=True)
        _barrier()

    def clear(self) -> None:
        """Remove the place that was written to."""
        shutil.rmtree(self.stage, ignore_errors=True)
        with suppress(OSError):  # another save is in there
            self.stage.parent.rmdir()

    def staged(self, upstream_name: Callable[..., str]) -> Callable[..., str]:
        """Return upstream's function of a path below --save, leading to the stage instead."""

        def name(path: str, *rest: Any, **options: Any) -> str:
            return upstream_name(str(self.stage) if Path(path) == self.save else path, *rest, **options)

        return name

    def announce_later(self, upstream: Callable[..., None]) -> Callable[..., None]:
        """Hold back what tells Weights & Biases of the checkpoint until it is where it is said to be."""

        def on_save_checkpoint_success(name: str, tracker: str, save_dir: str, iteration: int) -> None:
            final = str(step_folder(self.save, self.step)) + name.removeprefix(str(step_folder(self.stage, self.step)))
            self._announce = lambda: upstream(final, str(self.save / TRACKER), save_dir, iteration)

        return on_save_checkpoint_success

    def finish(self) -> None:
        """Judge what was written, move it into place, name it, remove what is too old; on the first rank."""
        if _is_first_rank():
            location = find_checkpoint(self.stage, self.step)
            if (damage := damage_of(location)) is not None:
                raise CheckpointError(f"what was written is not whole: {damage}")
            final = step_folder(self.save, self.step)
            if final.exists():
                _exchange(location.folder, final)
            else:
                os.rename(location.folder, final)
            _sync(self.save)
            write_tracker(self.save, self.stage, self.step)
            if self.step is not None:
                _remove_expired(self.save, self.stage, self.step, self.args)
            self.clear()
        _barrier()
        self._announce()

    def failure(self, error: BaseException, said: list[str]) -> CheckpointError:
        """Return what to say of a save that failed, with what its writers said; the disk is given back what it took."""
        there = next(folder for folder in (self.save, *self.save.absolute().parents) if folder.is_dir())
        cause = _cause(error, said, free=shutil.disk_usage(there).free)
        if _is_first_rank():
            self.clear()
        try:
            last = tracked_step(self.save)
            kept = f"step {last} is still the latest checkpoint" if last is not None else "the release is still there"
        except CheckpointError:
            kept = "no checkpoint is there yet"
        what = RELEASE if self.step is None else f"step {self.step}"
        return CheckpointError(f"saving {what} to {self.save} failed: {cause}; {kept}.")


class _Said(logging.Handler):
    """Keeps the errors that upstream's writers log: the exception that they raise later names only its class."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Collect what upstream's writers say of errors."""
    said, logger = _Said(), logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async")
    logger.addHandler(said)
    try:
        yield said.lines
    finally:
        logger.removeHandler(said)


def _cause(error: BaseException, said: list[str], free: int) -> str:
    """Return the reason of a failed save: that of the operating system where it is in the chain or the texts."""
    if free < _FULL_DISK_BYTES:
        return f"{os.strerror(errno.ENOSPC)} ({free:,} bytes are free)"
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return os.strerror(seen.errno)
        seen = seen.__cause__ or seen.__context__
    lines = [*said[:1], *str(error).strip().splitlines()[-1:]]
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO):
        if any(os.strerror(number) in line for line in lines):
            return os.strerror(number)
    reason = lines[0][:300] if lines else type(error).__name__
    if "inline_container" in reason:  # torch's zip writer, which says nothing of the system's reason
        reason = "a file could not be written to its end"
    return f"{reason} ({free:,} bytes are free on that disk)"


def _stage(upstream_save: Callable[..., None]) -> Callable[..., None]:
    def save_checkpoint(iteration: int, *rest: Any, **options: Any) -> None:
        import megatron.training.checkpointing as checkpointing
        import megatron.training.wandb_utils as wandb_utils
        from megatron.training.global_vars import get_args
        from torch.distributed.checkpoint.api import CheckpointException

        args = get_args()
        if args.save is None:  # the trainer asks for a save when it gives up on a NaN, whatever the flags
            if _is_first_rank():
                print(f"> step {iteration}: nothing is saved, there is no --save", flush=True)
            return
        save = _Save(args, iteration, options.get("release", False))
        announce = save.announce_later(wandb_utils.on_save_checkpoint_success)
        said: list[str] = []
        try:
            save.prepare()
            with Replacements() as replaced, _heard() as said:
                for name in ("get_checkpoint_name", "get_checkpoint_tracker_filename"):
                    replaced.set(checkpointing, name, save.staged(getattr(checkpointing, name)))
                replaced.set(wandb_utils, "on_save_checkpoint_success", announce)
                if args.async_save:
                    replaced.set(checkpointing, "schedule_async_save", _finished_by(save, announce))
                upstream_save(iteration, *rest, **options)
            if not args.async_save:
                save.finish()
        except (Exception, SystemExit, CheckpointException) as error:  # the last is torch's own, and no Exception
            raise save.failure(error, said) from error

    return save_checkpoint


def _finished_by(save: _Save, announce: Callable[..., None]) -> Callable[[Any], None]:
    """Return upstream's scheduling of an asynchronous save, with the last steps of a save at its end."""
    import megatron.training.checkpointing as checkpointing
    import megatron.training.wandb_utils as wandb_utils

    schedule = checkpointing.schedule_async_save

    def announced_later(finalize: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with Replacements() as replaced:
                replaced.set(wandb_utils, "on_save_checkpoint_success", announce)
                finalize()

        return run

    def schedule_async_save(request: Any) -> None:
        request.finalize_fns[:] = [announced_later(finalize) for finalize in request.finalize_fns]
        request.add_finalize_fn(save.finish)
        schedule(request)

    return schedule_async_save


PATCHES = (
    UpstreamPatch(
        module="megatron.training.training",
        name="save_checkpoint",
        reason="writes in place and empties the tracker file before it writes it",
        source_sha256="b652984ca8c8309dede9bb01bb9df1ec30e22ff17d2d5316134cd02d1b692d0e",
        make=_stage,
    ),
)
