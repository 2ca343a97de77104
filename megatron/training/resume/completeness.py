"""Tells whether a checkpoint is whole, without reading its tensors.

    require_whole(location)              # CheckpointError that names the file, and the steps that are whole
    damage_of(location)                  # the same as a phrase, or None
    whole_steps(load)                    # [10, 20]

For torch_dist `.metadata` says which file holds which bytes, so every file must be there with exactly that size, and
the parts of every tensor must add up to it. A plain checkpoint needs a readable zip file (its directory stands at the
end) of every rank of the stored layout.

What always holds: nothing is written; a file whose size is right is not read (--verify-integrity compares contents).
"""

from __future__ import annotations

import json
import math
import zipfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import (
    PLAIN_FILE,
    TORCH_DIST_CONFIG,
    CheckpointLocation,
    format_of,
    saved_steps,
    step_folder,
    steps_there,
)

COMMON_FILE = "common.pt"
COMMON_KEY = "common_state"
OPTIMIZER_FILE = "distrib_optim.pt"
_STEPS_LOOKED_AT = 8


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _size_damage(folder: Path, name: str, wanted: int) -> str | None:
    file = folder / name
    if not file.is_file():
        return f"{name} is missing"
    found = file.stat().st_size
    return None if found == wanted else f"{name} has {found:,} bytes, {wanted:,} are wanted"


def _torch_dist_damage(folder: Path) -> str | None:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        backend = json.loads((folder / TORCH_DIST_CONFIG).read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{TORCH_DIST_CONFIG} cannot be read ({_reason(error)})"
    if backend != "torch_dist":
        return f"{TORCH_DIST_CONFIG} names the backend {backend!r}, torch_dist is wanted"
    if not (folder / ".metadata").is_file():
        return ".metadata is missing"
    try:
        metadata = FileSystemReader(folder).read_metadata()
        ends: dict[str, int] = defaultdict(int)
        for entry in metadata.storage_data.values():
            ends[entry.relative_path] = max(ends[entry.relative_path], entry.offset + entry.length)
        stored = {index.fqn for index in metadata.storage_data}
    except Exception as error:  # an unpickler raises anything on damaged bytes
        return f".metadata cannot be read ({_reason(error)})"
    for name, end in sorted(ends.items()):
        if (damage := _size_damage(folder, name, end)) is not None:
            return damage
    if lost := sorted(set(metadata.state_dict_metadata) - stored):
        return f".metadata says of {len(lost)} keys ({lost[0]}, ...) nowhere where they are"
    if (damage := _lost_parts(metadata)) is not None:
        return damage
    if any(key.split("/")[0] == COMMON_KEY for key in stored):
        return None
    # An older checkpoint: arguments and iteration in a file of their own.
    return _zip_damage(folder / COMMON_FILE, COMMON_FILE)


def _lost_parts(metadata: Any) -> str | None:
    """Return which tensor lacks a part, or None; upstream would keep what is in memory in place of it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from megatron.training.checkpoints.stored_names import is_bucket_key

    for key, description in metadata.state_dict_metadata.items():
        chunks = getattr(description, "chunks", None)
        if chunks is None or is_bucket_key(
            key
        ):  # an object; the distributed optimizer's buckets have gaps of their own
            continue
        for chunk in chunks:
            if MetadataIndex(key, chunk.offsets) not in metadata.storage_data:
                return f".metadata does not say where the part of {key} at {list(chunk.offsets)} is"
        held, wanted = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(description.size)
        if held != wanted:
            return f"{key} has {held:,} of {wanted:,} elements in its {len(chunks)} parts"
    return None


def _zip_damage(file: Path, name: str) -> str | None:
    if not file.is_file():
        return f"{name} is missing"
    try:
        zipfile.ZipFile(file).close()
    except (zipfile.BadZipFile, OSError) as error:
        return f"{name} cannot be read ({_reason(error)}); it has {file.stat().st_size:,} bytes"
    return None


def plain_rank_folders(args: Any) -> list[str]:
    """Return the folders of all ranks of a plain checkpoint that a run with these arguments saves."""
    tensor, pipeline, expert = (
        getattr(args, f"{name}_model_parallel_size", None) or 1 for name in ("tensor", "pipeline", "expert")
    )
    return [
        f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") + (f"_{e:03d}" if expert > 1 else "")
        for t, p, e in product(range(tensor), range(pipeline), range(expert))
    ]


def _plain_damage(location: CheckpointLocation) -> str | None:
    from megatron.training.resume.stored import stored_common

    first = next(iter(sorted(location.folder.glob("mp_rank_*"))))
    if (damage := _zip_damage(first / PLAIN_FILE, f"{first.name}/{PLAIN_FILE}")) is not None:
        return damage
    args = stored_common(location).get("args")
    folders = [first.name] if args is None else plain_rank_folders(args)
    files = [f"{name}/{PLAIN_FILE}" for name in folders]
    expert = getattr(args, "expert_model_parallel_size", None) or 1
    optimizer = getattr(args, "use_distributed_optimizer", False) and not getattr(args, "no_save_optim", False)
    if optimizer and expert == 1:
        files += [f"{name}/{OPTIMIZER_FILE}" for name in folders]
    for name in files:
        if (damage := _zip_damage(location.folder / name, name)) is not None:
            return damage
    return None


def damage_of(location: CheckpointLocation) -> str | None:
    """Return what is wrong with a checkpoint's files, or None when it is whole."""
    try:
        return _torch_dist_damage(location.folder) if location.format == "torch_dist" else _plain_damage(location)
    except CheckpointError as error:
        return str(error)


def is_whole(load: Path, step: int) -> bool:
    """Return whether a step is there and whole."""
    folder = step_folder(load, step)
    found = format_of(folder)
    return found is not None and damage_of(CheckpointLocation(load, step, folder, found)) is None


def whole_steps(load: Path) -> list[int]:
    """Return which of the latest steps in the folder are whole, ascending."""
    return [step for step in saved_steps(load)[-_STEPS_LOOKED_AT:] if is_whole(load, step)]


def require_whole(location: CheckpointLocation) -> None:
    """Raise CheckpointError, with the steps that are whole, unless the checkpoint is."""
    damage = damage_of(location)
    if damage is not None:
        raise CheckpointError(f"{location.folder} is not whole: {damage}{steps_there(location.load)}.")
