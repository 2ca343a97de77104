"""Finds a checkpoint on disk: its step, its folder, its format.

    location = find_checkpoint("runs/mine/checkpoints")           # the step that the tracker file names
    location = find_checkpoint("runs/mine/checkpoints", step=50)
    holds_nothing("runs/mine/checkpoints")                        # no checkpoint and no trace of one

What always holds: what is returned is there and has a known format (completeness.py tells whether it is whole);
everything else is a CheckpointError that names what was found and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.training.resume.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
# Where staged_save.py writes; what is in there is no checkpoint yet.
UNFINISHED = "unfinished_save"
TORCH_DIST_CONFIG = "metadata.json"
PLAIN_FILE = "model_optim_rng.pt"

CheckpointFormat = Literal["torch_dist", "torch"]


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint: the folder given as --load, the step (None for a release), its own folder and its format."""

    load: Path
    step: int | None
    folder: Path
    format: CheckpointFormat


def step_folder(load: Path, step: int | None) -> Path:
    """Return the folder of a step (None: of a release), as upstream names it."""
    return load / (RELEASE if step is None else f"iter_{step:07d}")


def saved_steps(load: Path) -> list[int]:
    """Return the steps that have a folder, whole or not, ascending."""
    return sorted(int(match[1]) for entry in load.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", entry.name)))


def holds_nothing(load: str | Path) -> bool:
    """Return whether a folder is absent or has neither tracker file nor folder of a step (or of a release)."""
    load = Path(load)
    if not load.is_dir():
        return not load.exists()
    return not (load / TRACKER).exists() and not (load / RELEASE).exists() and not saved_steps(load)


def tracker_file(load: Path) -> Path:
    """Return the file that names the latest step.

    A first save that was killed after its last rename but one has put its folder in place and left the tracker file
    where it was written.
    """
    tracker = load / TRACKER
    if not tracker.exists():
        for folder in sorted(load.glob("iter_*")):
            if (waiting := load / UNFINISHED / folder.name / TRACKER).is_file():
                return waiting
    return tracker


def tracked_step(load: Path) -> int | None:
    """Return the step that the tracker file names, or None for a release.

    Raises:
        CheckpointError: no tracker file, or one that holds anything but a step number (a newline may follow).
    """
    tracker = tracker_file(load)
    if not tracker.is_file():
        parent = load.resolve().parent
        if (parent / TRACKER).is_file():
            raise CheckpointError(
                f"{load} is the folder of one step: give --load {load.parent}, and --ckpt-step for a step that is not "
                "the latest."
            )
        raise CheckpointError(
            f"no checkpoint in {load}: {TRACKER} is not there{steps_there(load)}. Give the folder that training had as "
            "--save."
        )
    text = tracker.read_bytes().decode("utf-8", "replace")
    if text.removesuffix("\n") == RELEASE:
        return None
    if not re.fullmatch(r"[0-9]{1,18}\n?", text):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, a step number is wanted{steps_there(load)}.")
    return int(text)


def steps_there(load: Path) -> str:
    """Return what to say of the steps that could be chosen instead: those that are whole."""
    from megatron.training.resume.completeness import whole_steps

    steps = whole_steps(load)
    if not steps:
        return ", and no whole checkpoint is there"
    return f"; whole: {', '.join(map(str, steps))} (--ckpt-step {steps[-1]} takes that one)"


def format_of(folder: Path) -> CheckpointFormat | None:
    """Return the format of a step's folder, or None when it holds no checkpoint of a known one."""
    if (folder / TORCH_DIST_CONFIG).is_file():
        return "torch_dist"
    return "torch" if any(folder.glob("mp_rank_*")) else None


def _unknown_format(folder: Path) -> CheckpointError:
    if (folder / ".metadata").exists():
        return CheckpointError(
            f"{folder} has no {TORCH_DIST_CONFIG}: its saving was interrupted, or its format is torch_dcp or "
            f"fsdp_dtensor, and torch_dist or torch (--ckpt-format) is wanted{steps_there(folder.parent)}."
        )
    return CheckpointError(
        f"{folder} holds no checkpoint: neither {TORCH_DIST_CONFIG} (torch_dist) nor mp_rank_00/{PLAIN_FILE} (torch) "
        f"is there{steps_there(folder.parent)}. Was its saving interrupted?"
    )


def find_checkpoint(load: str | Path, step: int | None = None) -> CheckpointLocation:
    """Return where the checkpoint is; step None takes the one that the tracker file names.

    Raises:
        CheckpointError: no such folder, no or a broken tracker file, a step that is not there, an unknown format.
    """
    load = Path(load)
    if not load.is_dir():
        what = "is no folder" if load.exists() else "no such folder"
        raise CheckpointError(f"--load {load}: {what}. Give the folder that training had as --save.")
    named = "--ckpt-step" if step is not None else TRACKER
    if step is None:
        step = tracked_step(load)
    folder = step_folder(load, step)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not there, but {named} names it{steps_there(load)}.")
    found = format_of(folder)
    if found is None:
        raise _unknown_format(folder)
    return CheckpointLocation(load, step, folder, found)


def check_step(location: CheckpointLocation, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the folder of a step holds the state of another one."""
    found = state.get("iteration", location.step)
    if location.step is not None and found != location.step:
        raise CheckpointError(
            f"{location.folder} holds the state of step {found}: files of two steps were mixed, or the folder was "
            f"renamed. Put back what belongs there, or load the folder of step {found}.",
            on_all_ranks=True,
        )
