"""Finds a checkpoint on disk: its step, its folder, its format.

    location = find_checkpoint("runs/mine/checkpoints")           # the step that the tracker file names
    location = find_checkpoint("runs/mine/checkpoints", step=50)

What always holds: what is returned is there and has a known format; everything else is a GenerationError that names
what was looked for and what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.training.generation.errors import GenerationError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"

CheckpointFormat = Literal["torch_dist", "torch"]


@dataclass(frozen=True)
class CheckpointLocation:
    """A checkpoint: the folder given as --load, the step (None for a release), its own folder and its format."""

    load: Path
    step: int | None
    folder: Path
    format: CheckpointFormat


def _saved_steps(load: Path) -> list[int]:
    return sorted(int(match[1]) for entry in load.iterdir() if (match := re.fullmatch(r"iter_(\d{7,})", entry.name)))


def _tracked_step(load: Path) -> int | None:
    """Return the step that the tracker names, or None for a release."""
    tracker = load / TRACKER
    if not tracker.is_file():
        parent = load.resolve().parent
        if (parent / TRACKER).is_file():
            raise GenerationError(
                f"{load} is the folder of one step: give --load {load.parent}, and --ckpt-step for a step that is not "
                "the latest."
            )
        raise GenerationError(
            f"no checkpoint in {load}: {TRACKER} is not there. Give the folder that training had as --save."
        )
    text = tracker.read_bytes().decode("utf-8", "replace").strip()
    if text == RELEASE:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise GenerationError(
            f"{tracker} holds {text[:40]!r}, a step number is wanted: choose a step with --ckpt-step"
            f"{_among(_saved_steps(load))}."
        )
    return int(text)


def _among(steps: list[int]) -> str:
    return f" (there: {', '.join(map(str, steps[-8:]))})" if steps else " (but none is there)"


def _format(folder: Path) -> CheckpointFormat:
    if (folder / "metadata.json").is_file():
        return "torch_dist"
    if any(folder.glob("mp_rank_00*/model_optim_rng.pt")):
        return "torch"
    if (folder / ".metadata").exists():
        raise GenerationError(
            f"{folder} has the format torch_dcp or fsdp_dtensor; torch_dist or torch (--ckpt-format) is wanted."
        )
    raise GenerationError(
        f"{folder} holds no checkpoint: neither metadata.json (torch_dist) nor mp_rank_00/model_optim_rng.pt (torch) "
        "is there. Was its saving interrupted?"
    )


def find_checkpoint(load: str | Path, step: int | None = None) -> CheckpointLocation:
    """Return where the checkpoint is; step None takes the one that the tracker file names.

    Raises:
        GenerationError: no such folder, no or a broken tracker file, a step that is not there, an unknown format.
    """
    load = Path(load)
    if not load.is_dir():
        raise GenerationError(f"--load {load}: no such folder. Give the folder that training had as --save.")
    if step is None:
        step = _tracked_step(load)
    folder = load / (RELEASE if step is None else f"iter_{step:07d}")
    if not folder.is_dir():
        raise GenerationError(f"{folder} is not there: choose a step with --ckpt-step{_among(_saved_steps(load))}.")
    return CheckpointLocation(load, step, folder, _format(folder))
