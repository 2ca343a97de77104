"""Loads a checkpoint's weights into a model on one process, or says which keys differ.

    load_sharded(model, location, common_state)      # torch_dist, saved in any layout
    load_plain(model, location, state)               # torch, saved by one rank

Upstream's load_checkpoint is not used: after a strict load that fails it loads once more without strictness, and it
ignores tensors of a torch_dist checkpoint that the model lacks.

What always holds: every weight of the model is in the checkpoint and every weight of the checkpoint's model is in the
model, of the same shape; else nothing may be used and a GenerationError says what differs. Optimizer state is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.dist_checkpointing as dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.parallel_state import get_data_parallel_group
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training.generation.checkpoint_location import CheckpointLocation
from megatron.training.generation.errors import GenerationError

_OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")


@contextmanager
def damage_reported(location: CheckpointLocation) -> Iterator[None]:
    """Turn what the readers raise on a damaged file (they raise all kinds, and exit) into a GenerationError."""
    try:
        yield
    except GenerationError:
        raise
    except CheckpointException as error:  # no Exception; its text holds the tracebacks of all ranks
        reason = str(error).strip().splitlines()[-1][:300]
        raise GenerationError(f"{location.folder} cannot be read ({reason}). Is it whole?") from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise GenerationError(f"{location.folder} cannot be read ({reason}). Is it whole?") from error


def _difference(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    parts = []
    for what, keys in (("not in the checkpoint", sorted(missing)), ("not in the model", sorted(unexpected))):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            parts.append(f"{what}: {', '.join(keys[:3])}{more}")
    return "; ".join(parts)


def _tensor_keys(sharded: Any) -> Iterator[str]:
    """Yield the key under which each tensor of a sharded state dict is stored."""
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedTensorFactory):  # stands for the tensors that it splits one into (SwiGLU's halves)
            yield from _tensor_keys(leaf.build())
        elif isinstance(leaf, ShardedTensor):
            yield leaf.key


def load_sharded(model: Any, location: CheckpointLocation, state: dict[str, Any]) -> None:
    """Load a torch_dist checkpoint of any layout into `model`; every tensor has to be in both."""
    folder = str(location.folder)
    metadata = dict(dist_checkpointing.load_content_metadata(preloaded_state_dict=state) or {})
    metadata["dp_cp_group"] = get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata=metadata)
    wanted = set(_tensor_keys(sharded))
    with damage_reported(location):
        found = {key for key in dist_checkpointing.load_tensors_metadata(folder) if not _OPTIMIZER_KEY.match(key)}
    if wanted != found:
        raise GenerationError(f"{folder} is not this model's: {_difference(wanted - found, found - wanted)}.")
    with damage_reported(location):
        loaded = dist_checkpointing.load({"model": sharded}, folder)
        model.load_state_dict(loaded["model"], strict=True)


def load_plain(model: Any, location: CheckpointLocation, state: dict[str, Any]) -> None:
    """Load the plain checkpoint that `state` holds into `model`, strictly."""
    if "model" not in state:
        raise GenerationError(f"{location.folder} has no model (it has {', '.join(map(str, state))}).")
    try:
        model.load_state_dict(state["model"], strict=True)
    except RuntimeError as error:  # names the keys and shapes that differ
        text = " ".join(str(error).split())
        raise GenerationError(f"{location.folder} is not this model's: {text[:600]}") from error
