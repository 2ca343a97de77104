"""A torch_dist checkpoint beside the sharded state dict that a run wants to load from it.

    entries = stored_entries(folder)                         # name -> Entry, from .metadata alone
    wanted = wanted_entries(sharded)                         # the same of a sharded state dict, of this rank
    sharded = with_stored_keys(sharded, entries)             # older residual keys, where the checkpoint has those
    entries = entries_to_load(entries, sharded)              # without state that this run does not load

What always holds: no function changes the state dict that it is given; names are those under which a checkpoint stores
tensors and objects, so layers of all pipeline stages and experts of all ranks have one name each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from megatron.core.transformer.wide_residual import _RESIDUAL_STATE_PREFIXES
from megatron.training.resume.completeness import COMMON_KEY
from megatron.training.resume.differences import Entry
from megatron.training.resume.errors import CheckpointError

OPTIMIZER_KEY = re.compile(r"(chained_\d+\.)?optimizer\.")
# Optimizer state by position in a buffer of parameters: no parameter's name is in the key.
BUCKET_KEY = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_")
_STATE_KEYS = {"rng_state": re.compile(r"(.*\.)?rng_state/"), "rerun_state_machine": re.compile(r"rerun_state_machine")}


def _entry(leaf: ShardedTensor | ShardedObject) -> tuple[str, Entry]:
    if isinstance(leaf, ShardedObject):
        return leaf.unique_key, Entry()
    return leaf.key, Entry(tuple(leaf.global_shape), leaf.dtype)


def stored_entries(folder: str | Path) -> dict[str, Entry]:
    """Return what a checkpoint stores: name -> shape and dtype of the whole tensor; the common state is left out."""
    leaves = load_sharded_metadata(str(folder)).values()
    return dict(_entry(leaf) for leaf in leaves if leaf.key != COMMON_KEY)


def _leaves(sharded: Any) -> Iterator[ShardedTensor | ShardedObject]:
    for leaf in nested_values(sharded):
        if isinstance(leaf, ShardedTensorFactory):  # stands for the tensors that it splits one into (SwiGLU's halves)
            yield from _leaves(leaf.build())
        elif isinstance(leaf, ShardedTensor | ShardedObject):
            yield leaf


def wanted_entries(sharded: Any) -> dict[str, Entry]:
    """Return what a sharded state dict asks for on this rank: name -> shape and dtype of the whole tensor."""
    return dict(_entry(leaf) for leaf in _leaves(sharded))


def resizable_names(sharded: Any) -> set[str]:
    """Return the names whose first dimension is the padded vocabulary, which follows the tensor-parallel size."""
    return {leaf.key for leaf in _leaves(sharded) if getattr(leaf, "allow_shape_mismatch", False)}


def entries_to_load(stored: Mapping[str, Entry], sharded: Mapping[str, Any]) -> dict[str, Entry]:
    """Return stored without the optimizer, the RNG and the rerun state where the sharded state dict asks for none."""
    left_out = [pattern for name, pattern in _STATE_KEYS.items() if name not in sharded]
    if "optimizer" not in sharded:
        left_out.append(OPTIMIZER_KEY)
    return {name: entry for name, entry in stored.items() if not any(pattern.match(name) for pattern in left_out)}


def base_name(name: str) -> str:
    """Return the name of an object without its shard."""
    return name.split("/shard_", 1)[0]


def combined_name(name: str) -> str | None:
    """Return the name in the older combined layout of a residual map's split name, or None for any other name."""
    for combined, read, write in _RESIDUAL_STATE_PREFIXES:
        for split, parts in ((read, ("read_map.",)), (write, ("write_map.", "retention."))):
            for part in parts:
                if (found := re.search(rf"(^|\.){re.escape(split + part)}", name)) is not None:
                    start = found.end() - len(split + part)
                    return name[:start] + combined + part + name[found.end() :]
    return None


def has_combined_names(stored: Mapping[str, Entry]) -> bool:
    """Return whether a checkpoint has residual maps in the older combined layout."""
    return any(
        re.search(rf"(^|\.){re.escape(combined)}(read_map|write_map|retention)\.", name)
        for combined, _, _ in _RESIDUAL_STATE_PREFIXES
        for name in stored
    )


def _map_leaves(function: Any, state: Any) -> Any:
    """Return a copy of nested dicts and lists with every leaf replaced by function(leaf)."""
    if isinstance(state, dict):
        return {key: _map_leaves(function, value) for key, value in state.items()}
    if isinstance(state, list):
        return [_map_leaves(function, value) for value in state]
    return function(state)


def with_stored_keys(sharded: Any, stored: Mapping[str, Entry]) -> Any:
    """Return a sharded state dict that reads residual maps under their older names where only those are stored.

    Raises:
        CheckpointError: optimizer state is asked for that the older checkpoint keeps by position alone.
    """
    if not has_combined_names(stored):
        return sharded
    if "optimizer" in sharded and any(map(BUCKET_KEY.match, stored)):
        raise CheckpointError(
            "the checkpoint has the older residual_connection keys, and its distributed optimizer's state stands by "
            "position alone, which those keys change: add --no-load-optim.",
            on_all_ranks=True,
        )

    def renamed(leaf: Any) -> Any:
        if not isinstance(leaf, ShardedTensor) or leaf.key in stored:
            return leaf
        older = combined_name(leaf.key)
        return replace(leaf, key=older) if older in stored else leaf

    return _map_leaves(renamed, sharded)


def without_names(sharded: Any, names: set[str]) -> Any:
    """Return a sharded state dict without the tensors and objects of these names (--load-non-strict)."""

    def keeps(leaf: Any) -> bool:
        return not isinstance(leaf, ShardedBase) or not names & set(wanted_entries([leaf]))

    if isinstance(sharded, dict):
        return {
            key: without_names(value, names)
            for key, value in sharded.items()
            if isinstance(value, dict | list) or keeps(value)
        }
    if isinstance(sharded, list):
        return [without_names(value, names) for value in sharded if isinstance(value, dict | list) or keeps(value)]
    return sharded


def of_all_ranks(local: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of a dict over all processes."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return dict(local)
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, dict(local))
    return {name: value for rank in gathered for name, value in rank.items()}
