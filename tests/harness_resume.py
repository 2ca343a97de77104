"""Train in this process, one run after another, each through the trainer that the scripts run: 2 s a start, not 10.

    train_here([*TINY_GPT, "--train-iters", "2", "--save", str(folder), ...])   # raises what the script reports
    message = refused_here([..., "--load", str(folder)])
    stored_tensors(folder)                                                      # what a torch_dist checkpoint holds

What always holds: nothing of a run outlives it; steps are those of the real trainer on the CPU host.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megatron.training.training as training
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron.cpu.host import training_host
from megatron.cpu.replacements import Replacements
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.model_kinds import MODEL_KINDS
from megatron.training.pretrain_entry import train
from megatron.training.resume.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def train_here(options: Sequence[str]) -> list[float]:
    """Run the trainer in this process; returns the loss of every step. Raises what the script would report."""
    kind = MODEL_KINDS["hybrid" if "--hybrid-layer-pattern" in options else "gpt"]
    losses: list[float] = []

    def observe(step: Any) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Any:
            outcome = step(*args, **kwargs)
            losses.append(float(outcome[0]["lm loss"]))
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
    return losses


def refused_here(options: Sequence[str]) -> str:
    """Run the trainer, which must refuse with a message that the script prints before it ends with status 2."""
    with pytest.raises((CheckpointError, LocalChoiceError)) as refusal:
        train_here(options)
    return str(refusal.value)


def copy_of(checkpoints: Path, target: Path) -> Path:
    """Copy a --save folder; returns the copy."""
    shutil.copytree(checkpoints, target)
    return target


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Everything that a torch_dist checkpoint holds, by name: tensors, and objects as bytes."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size"):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            state[name] = io.BytesIO()
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return {name: value.getvalue() if isinstance(value, io.BytesIO) else value for name, value in state.items()}
