"""Loads a checkpoint's weights into a model on one process, or says which keys differ.

    load_sharded(model, location, common_state)      # torch_dist, saved in any layout
    load_plain(model, location, state)               # torch, saved by one rank

The comparison is the trainer's (megatron/training/resume): keys, shapes and dtypes, older residual keys included.

What always holds: every weight of the model is in the checkpoint and every weight of the checkpoint's model is in the
model; else nothing is loaded and a GenerationError says what differs. Optimizer state is ignored.
"""

from __future__ import annotations

from typing import Any

import megatron.core.dist_checkpointing as dist_checkpointing
from megatron.core.parallel_state import get_data_parallel_group

from megatron.training.generation.checkpoint_location import CheckpointLocation, checkpoint_errors
from megatron.training.generation.errors import GenerationError
from megatron.training.resume import plain, sharded
from megatron.training.resume.differences import Differences, differences
from megatron.training.resume.stored import damage_reported


def _require_none(found: Differences, location: CheckpointLocation) -> None:
    if found:
        raise GenerationError(f"{location.folder} is not this model's: {found.describe('; ')}.")


def load_sharded(model: Any, location: CheckpointLocation, state: dict[str, Any]) -> None:
    """Load a torch_dist checkpoint of any layout into `model`; every tensor has to be in both."""
    folder = str(location.folder)
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=state) or {})
    metadata["dp_cp_group"] = get_data_parallel_group(with_context_parallel=True)
    with checkpoint_errors(), damage_reported(location):
        stored = sharded.stored_entries(folder)
        wanted = sharded.with_stored_keys({"model": model.sharded_state_dict(metadata=metadata)}, stored)
        found = differences(sharded.wanted_entries(wanted), sharded.entries_to_load(stored, wanted))
    _require_none(found, location)
    with checkpoint_errors(), damage_reported(location):
        loaded = dist_checkpointing.load(wanted, folder)
        model.load_state_dict(loaded["model"], strict=True)


def load_plain(model: Any, location: CheckpointLocation, state: dict[str, Any]) -> None:
    """Load the plain checkpoint that `state` holds into `model`."""
    if "model" not in state:
        raise GenerationError(f"{location.folder} has no model (it has {', '.join(map(str, state))}).")
    split = plain.with_split_keys(state, 1)
    _require_none(plain.plain_differences([model], None, split), location)
    model.load_state_dict(split["model"], strict=True)
