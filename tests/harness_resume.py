"""Train in this process, one run after another, each through the trainer that the scripts run: 2 s a start, not 10.

    train_here([*TINY_GPT, "--train-iters", "2", "--save", str(folder), ...])   # raises what the script reports
    message = refused_here([..., "--load", str(folder)])
    stored_tensors(folder)                                                      # what a torch_dist checkpoint holds

What always holds: nothing of a run outlives it; steps are those of the real trainer on the CPU host.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import megatron.training.training as training
import pytest
import torch
from megatron.training.global_vars import get_args
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.cpu.host import training_host
from megatron.cpu.replacements import Replacements
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.model_kinds import MODEL_KINDS
from megatron.training.pretrain_entry import train
from megatron.training.resume import strict_load
from megatron.training.resume.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def train_here(options: Sequence[str], on_step: Callable[[int, float], Any] | None = None) -> list[float]:
    """Run the trainer in this process; returns the loss of every step, and gives it to on_step(step, loss).

    Raises what the script would report.
    """
    kind = MODEL_KINDS["hybrid" if "--hybrid-layer-pattern" in options else "gpt"]
    losses: list[float] = []

    def observe(step: Any) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Any:
            outcome = step(*args, **kwargs)
            losses.append(float(outcome[0]["lm loss"]))
            if on_step is not None:
                on_step(get_args().curr_iteration + 1, losses[-1])
            return outcome

        return observed

    with training_host() as host, Replacements() as replaced:
        # Without worker processes: they would be forked from a process with the threads of earlier runs.
        replaced.set(sys, "argv", ["pretrain", *options, "--num-workers", "0"])
        replaced.set(training, "train_step", observe(training.train_step))
        try:
            train(host, kind, store=torch.distributed.HashStore())
        except SystemExit as end:  # how upstream ends at --exit-interval
            if end.code or "--exit-interval" not in options:
                raise
        finally:
            training.destroy_global_state()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()  # groups are in cycles, and each keeps a thread that wakes up a hundred times a second
    return losses


def refused_here(options: Sequence[str]) -> str:
    """Run the trainer, which must refuse with a message that the script prints before it ends with status 2."""
    with pytest.raises((CheckpointError, LocalChoiceError)) as refusal:
        train_here(options)
    return str(refusal.value)


class _EnoughError(Exception):
    """Ends a run that has done what it was started for."""


def with_load(options: Sequence[str], body: Callable[[Callable[[str], Any], Any], None]) -> None:
    """Start a run and call `body(load, (chunks, optimizer, scheduler))` in it; `load(folder)` loads a --load folder.

    Everything up to the load is the trainer's; the run ends there. So one start serves many checkpoints.
    """

    first, *others = strict_load.PATCHES

    def capture(upstream: Any) -> Any:
        strict = first.make(upstream)

        def load_checkpoint(model: Any, optimizer: Any, *rest: Any, **given: Any) -> Any:
            def load(folder: Any) -> Any:
                get_args().load = str(folder)
                return strict(model, optimizer, *rest, **given)

            body(load, (model, optimizer, *rest))
            raise _EnoughError

        return load_checkpoint

    with Replacements() as replaced:
        replaced.set(strict_load, "PATCHES", (dataclasses.replace(first, make=capture), *others))
        with pytest.raises(_EnoughError):
            train_here(options)


def with_load_and_save(options: Sequence[str], target: Path, step: int) -> None:
    """Start a run, let it load its --load, and save what it has then to another folder, as a step."""

    def body(load: Callable[[str], Any], parts: Any) -> None:
        args = get_args()
        load(args.load)
        args.save = str(target)
        training.save_checkpoint(step, *parts, 0)

    with_load(options, body)


def copy_of(checkpoints: Path, target: Path) -> Path:
    """Copy a --save folder; returns the copy."""
    shutil.copytree(checkpoints, target)
    return target


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Everything that a torch_dist checkpoint holds, by name: tensors and objects."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            state[name] = io.BytesIO()
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def edit_metadata(folder: Path, edit: Callable[[dict[str, Any], dict[Any, Any]], None]) -> None:
    """Change what a torch_dist checkpoint says that it holds: edit(entries by name, places by (name, offset))."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata.state_dict_metadata, metadata.storage_data)
    file.write_bytes(pickle.dumps(metadata))


def rename_stored(folder: Path, old: str, new: str) -> None:
    """Give a tensor or object of a torch_dist checkpoint another name."""

    def edit(entries: dict[str, Any], places: dict[Any, Any]) -> None:
        entries[new] = entries.pop(old)
        for index in [index for index in places if index.fqn == old]:
            places[dataclasses.replace(index, fqn=new)] = places.pop(index)

    edit_metadata(folder, edit)
