"""Writes a torch_dist checkpoint one whole tensor at a time.

    writer = ShardedWriter(folder, entries, common, layout, style)
    for entry in entries: writer.write(entry, tensor)            # or writer.copy_key(reader, key)
    writer.finish()

Tensors are stored in the parts that ranks of `layout` would write; any layout can read them. What always holds:
`.metadata` and `metadata.json`, which make it a checkpoint, are written by finish(), which fails while a declared
tensor is missing.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo
from megatron.training.checkpoints.chunk_files import ChunkWriter
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import model_sizes
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.sharded_style import ShardedStyle, hybrid_pattern
from megatron.training.checkpoints.stored_rows import StoredRows, copy_rows
from megatron.training.checkpoints.tensor_archive import is_served
from megatron.training.checkpoints.tensor_splits import Replicated, Sectioned
from megatron.training.checkpoints.tensor_table import TensorPlace, find_tensor


def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype, layout=torch.strided, requires_grad=False, pin_memory=False)


class ShardedWriter:
    """A torch_dist checkpoint that is being written.

    Args:
        folder: of one step; it exists and is empty.
        entries: every tensor that will be written, with the shape of the whole.
        common: everything else.
        layout: of the ranks whose parts are stored.
        style: how keys are spelled; None: as a run would.
    """

    format = "torch_dist"

    def __init__(
        self,
        folder: Path,
        entries: Mapping[Entry, TensorInfo],
        common: Common,
        layout: Layout,
        style: ShardedStyle | None = None,
    ) -> None:
        self.folder, self.entries, self.common, self.layout = folder, dict(entries), common, layout
        self.style = style or ShardedStyle.of_model(common, {entry.name for entry in entries})
        self.sizes = model_sizes(common.args)
        self._chunks = ChunkWriter(folder)
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._missing = set(self.entries)
        places = [find_tensor(name) for name in {entry.name for entry in self.entries}]
        self._routed = {place.prefix for place in places if place.row.name == "mlp.router.weight"}
        self._layers = 1 + max((place.layer or 0 for place in places if place.in_decoder), default=-1)
        self._experts = 1 + max((place.expert for place in places if place.expert is not None), default=-1)
        self._copied_extra_states = False

    def _leading(self, place: TensorPlace) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a tensor's index and the lengths along the axes before its own."""
        pairs = []
        if self.style.stacked and place.in_decoder:
            pairs.append((place.layer or 0, self._layers))
        if place.row.expert:
            pairs.append((place.expert or 0, self._experts))
        return tuple(at for at, _ in pairs), tuple(count for _, count in pairs)

    def write(self, entry: Entry, whole: Tensor) -> None:
        """Write a whole tensor; its shape and dtype are the declared ones."""
        info = self.entries[entry]
        if entry not in self._missing:
            raise ConversionError(f"{entry} is written twice")
        if (tuple(whole.shape), whole.dtype) != info:
            raise ConversionError(f"{entry} is {TensorInfo(tuple(whole.shape), whole.dtype)}, {info} was declared")
        place = find_tensor(entry.name)
        split = place.row.split
        if isinstance(split, Sectioned) and split.keys:
            sections = whole.split(split.lengths(whole.shape[split.axis], self.sizes), split.axis)
            for number, section in enumerate(sections):
                self._write_key(place, entry.slot, section, number)
        else:
            self._write_key(place, entry.slot, whole, None)
        self._missing.discard(entry)

    def write_rows(self, entry: Entry, rows: StoredRows) -> bool:
        """Copy a whole tensor from the files that hold it; False: it has to be written."""
        info = self.entries[entry]
        place = find_tensor(entry.name)
        split = place.row.split
        if rows.info != info or not is_served(whole := torch.empty(info.shape, dtype=info.dtype, device="meta")):
            return False
        if isinstance(split, Sectioned) and split.keys:
            return False
        axis = rows.axis if isinstance(split, Replicated) else split.axis
        source = rows.along(axis)
        if source is None:
            return False
        key, description, at = self._describe(place, entry.slot, info, None)
        target = []
        for start, part in self._parts(place, whole, None):
            offsets, sizes = torch.Size((*at, *start)), torch.Size((*(1 for _ in at), *part.shape))
            stored, chunk = self._chunks.reserve(part.reshape(sizes), ((start[axis], part.shape[axis]),))
            self._add_chunk(key, description, offsets, sizes, stored)
            target.append(chunk)
        copy_rows(source, target)
        self._missing.discard(entry)
        return True

    def start_writing(self) -> None:
        """Let the kernel begin to put on the disk what has been written so far."""
        self._chunks.start_writing()

    def _describe(
        self, place: TensorPlace, slot: str, info: TensorInfo, section: int | None
    ) -> tuple[str, TensorStorageMetadata, tuple[int, ...]]:
        """Return a stored tensor's key and description, and the index of this part in it."""
        key = self.style.key(place, slot, routed=place.prefix in self._routed, section=section)
        at, counts = self._leading(place)
        description = self._tensors.setdefault(
            key, TensorStorageMetadata(_properties(info.dtype), torch.Size((*counts, *info.shape)), [])
        )
        if tuple(description.size) != (*counts, *info.shape):
            raise ConversionError(
                f"{key} has layers of different shapes: {list(description.size)} and {list(info.shape)}"
            )
        return key, description, at

    def _add_chunk(
        self,
        key: str,
        description: TensorStorageMetadata,
        offsets: torch.Size,
        sizes: torch.Size,
        stored: tuple[str, int, int],
    ) -> None:
        description.chunks.append(ChunkStorageMetadata(offsets, sizes))
        self._storage[MetadataIndex(key, offsets)] = _StorageInfo(*stored)

    def _write_key(self, place: TensorPlace, slot: str, tensor: Tensor, section: int | None) -> None:
        info = TensorInfo(tuple(tensor.shape), tensor.dtype)
        key, description, at = self._describe(place, slot, info, section)
        for start, part in self._parts(place, tensor, section):
            offsets, sizes = torch.Size((*at, *start)), torch.Size((*(1 for _ in at), *part.shape))
            self._add_chunk(key, description, offsets, sizes, self._chunks.add_tensor(part.reshape(sizes)))

    def _parts(
        self, place: TensorPlace, tensor: Tensor, section: int | None
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield what ranks would store: where it starts in the tensor, and the part."""
        split = place.split(self.sizes["g"] == 2)
        parts = self.layout.expert_tensor if place.row.expert else self.layout.tensor
        if isinstance(split, Replicated) or not tensor.dim():
            yield (0,) * tensor.dim(), tensor
            return
        axis = split.axis
        gated = isinstance(split, Sectioned) and section is None
        sections = tensor.chunk(2, axis) if gated else (tensor,)
        start = 0
        for piece in sections:
            length = piece.shape[axis] // parts
            if length * parts != piece.shape[axis]:
                raise ConversionError(
                    f"{place.name} of shape {list(tensor.shape)} cannot be divided among {parts} ranks"
                )
            for rank in range(parts):
                offsets = [0] * tensor.dim()
                offsets[axis] = start + rank * length
                yield tuple(offsets), piece.narrow(axis, rank * length, length)
            start += piece.shape[axis]

    def copy_key(self, reader: ShardedReader, key: str, new_key: str | None = None) -> None:
        """Copy a stored tensor (of any layout) as its bytes are, under another key if wanted."""
        self.copy_stored(reader, key, new_key or key)
        self._missing -= set(reader.entries_of(key))

    def copy_stored(self, reader: ShardedReader, key: str, new_key: str) -> None:
        """Copy anything stored, whether the table knows it or not."""
        source = reader.metadata.state_dict_metadata[key]
        if isinstance(source, BytesStorageMetadata):
            self.copy_object(reader, key)
            return
        indices = [MetadataIndex(key, chunk.offsets) for chunk in source.chunks]
        infos = [reader.metadata.storage_data[index] for index in indices]
        copied = self._chunks.copy(reader.files, [(info.relative_path, info.offset, info.length) for info in infos])
        for chunk, stored in zip(source.chunks, copied, strict=True):
            self._storage[MetadataIndex(new_key, chunk.offsets)] = _StorageInfo(*stored)
        self._tensors[new_key] = TensorStorageMetadata(source.properties, source.size, list(source.chunks))

    def add_object(self, key: str, value: Any) -> None:
        """Write an object."""
        self._storage[MetadataIndex(key)] = _StorageInfo(*self._chunks.add_object(value))
        self._objects[key] = BytesStorageMetadata()

    def copy_object(self, reader: ShardedReader, key: str) -> None:
        """Copy an object as its bytes are."""
        info = reader.metadata.storage_data[MetadataIndex(key)]
        (stored,) = self._chunks.copy(reader.files, [(info.relative_path, info.offset, info.length)])
        self._storage[MetadataIndex(key)] = _StorageInfo(*stored)
        self._objects[key] = BytesStorageMetadata()

    def copy_extra_states(self, reader: ShardedReader) -> None:
        """Copy the `_extra_state` of every linear layer."""
        for key in reader.extra_state_keys:
            self.copy_object(reader, key)
        self._copied_extra_states = True

    def _write_extra_states(self) -> None:
        """Write the empty `_extra_state` that every linear layer of a model without Transformer Engine has."""
        keys = set()
        for entry in self.entries:
            place = find_tensor(entry.name)
            if entry.slot == WEIGHT and place.row.linear and place.name.endswith(".weight"):
                if place.name == "output_layer.weight":
                    continue
                key = self.style.key(place, WEIGHT, routed=False).removesuffix(".weight")
                at, counts = self._leading(place)
                shard = ".".join(map(str, at or (0,))) + "_" + ".".join(map(str, counts or (1,)))
                keys.add(f"{key}._extra_state/shard_{shard}")
        if hybrid_pattern(self.common) is not None:
            keys.add("output_layer._extra_state/shard_0_1")
        for key in sorted(keys):
            self.add_object(key, [None])

    def finish(self) -> None:
        """Write what makes it a checkpoint.

        Raises:
            ConversionError: a declared tensor has not been written.
        """
        if self._missing:
            raise ConversionError(
                f"{len(self._missing)} tensors have not been written, {min(self._missing)} among them"
            )
        for key, description in self._tensors.items():
            count = sum(math.prod(chunk.sizes) for chunk in description.chunks)
            if count != math.prod(description.size):
                raise ConversionError(f"{key} has {count} elements of {math.prod(description.size)}")
        if not self._copied_extra_states:
            self._write_extra_states()
        shape = f"{self.layout.pipeline}.{self.layout.tensor}"
        for (stage, rank), states in self.common.rng.items():
            self.add_object(f"rng_state/shard_{stage}.{rank}_{shape}", [states])
        self.add_object("common_state/shard_0_1", [self.common.state])
        self._chunks.close()
        metadata = Metadata(
            {**self._tensors, **self._objects}, None, self._storage, StorageMeta(checkpoint_id=str(self.folder.name))
        )
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        (self.folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )

    def abandon(self) -> None:
        """Close what is open; the folder is the caller's to remove."""
        self._chunks.close()
