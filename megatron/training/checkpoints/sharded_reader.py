"""Reads a torch_dist checkpoint one whole tensor at a time, whatever layout wrote it.

    with ShardedReader(folder) as reader:
        reader.entries[Entry("decoder.layers.0.mlp.linear_fc1.weight")]      # TensorInfo of the whole tensor
        reader.read(entry)                                                    # the tensor; nothing else is in memory
        reader.common.args, reader.common.iteration

What always holds: every key in the checkpoint is one of the table's, a known object, or a ConversionError; a tensor
with a missing or overlapping part is a ConversionError.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron.training.checkpoints.checkpoint_state import Common, Entry, TensorInfo
from megatron.training.checkpoints.chunk_files import ChunkFiles
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.stored_names import (
    StoredKey,
    is_bucket_key,
    is_extra_state_key,
    is_object_key,
    parse_key,
)
from megatron.training.checkpoints.stored_rows import FileChunk, StoredRows, covers
from megatron.training.checkpoints.tensor_splits import Sectioned

_RNG = re.compile(r"rng_state/shard_(\d+)\.(\d+)_")


def read_metadata(folder: Path) -> Metadata:
    """Return the description that torch_dist keeps of its tensors."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = pickle.load(file)
    except FileNotFoundError:
        raise ConversionError(f"{path} is not there: the checkpoint is not complete") from None
    except Exception as error:  # a pickle that has been cut off or overwritten raises anything
        raise ConversionError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise ConversionError(f"{path} holds a {type(metadata).__name__}; it is no torch_dist checkpoint")
    return metadata


class ShardedReader:
    """An open torch_dist checkpoint.

    Args:
        folder: of one step (iter_0000100).

    Raises:
        ConversionError: it is damaged, or has keys that the table does not know.
    """

    format = "torch_dist"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = ChunkFiles(folder)
        self.metadata = read_metadata(folder)
        self.keys: dict[str, StoredKey] = {}
        self.bucket_keys: list[str] = []
        self.extra_state_keys: list[str] = []
        self._places: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], MetadataIndex]]] = {}
        self._by_lead: dict[
            str, dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], MetadataIndex]]]
        ] = {}
        self._parts: dict[Entry, list[tuple[str, tuple[int, ...]]]] = {}
        self._sort_keys()
        self._index_chunks()
        self.entries: dict[Entry, TensorInfo] = {}
        for key in self.keys:
            self._add_entries(key)
        for entry, parts in self._parts.items():
            self.entries[entry] = self._info(entry, parts)
        self.common = self._read_common()

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    @property
    def combined(self) -> bool:
        """Whether controllers have their older names."""
        return any(key.combined for key in self.keys.values())

    def _sort_keys(self) -> None:
        for key, description in self.metadata.state_dict_metadata.items():
            if is_bucket_key(key):
                self.bucket_keys.append(key)
            elif isinstance(description, TensorStorageMetadata):
                self.keys[key] = parse_key(key)
            elif is_extra_state_key(key):
                self.extra_state_keys.append(key)
            elif not is_object_key(key):
                parse_key(key)  # raises, unless the name is a tensor's
                raise ConversionError(f"{key} is stored as an object, a tensor is wanted")

    def _tensor(self, key: str) -> TensorStorageMetadata:
        description = self.metadata.state_dict_metadata[key]
        assert isinstance(description, TensorStorageMetadata)
        return description

    def _index_chunks(self) -> None:
        storage = self.metadata.storage_data
        for key in self.keys:
            chunks = self._tensor(key).chunks
            by_offset = {}
            for chunk in chunks:
                by_offset[tuple(chunk.offsets)] = tuple(chunk.sizes)
            self._places[key] = [
                (offsets, sizes, MetadataIndex(key, torch.Size(offsets))) for offsets, sizes in by_offset.items()
            ]
            for offsets, _, index in self._places[key]:
                if index not in storage:
                    raise ConversionError(f"the part of {key} at {list(offsets)} is not in the checkpoint")

    def _add_entries(self, key: str) -> None:
        parsed = self.keys[key]
        shape = tuple(self._tensor(key).size)
        leading = shape[: parsed.leading_axes]
        for lead in _positions(leading):
            numbers = dict(zip(parsed.leading_names, lead, strict=True))
            entry = Entry(parsed.place.at(**numbers).name, parsed.slot)
            parts = self._parts.setdefault(entry, [])
            if parsed.section is None and parts:
                raise ConversionError(f"{entry} is stored twice, as {parts[0][0]} and as {key}")
            parts.append((key, lead))

    def _info(self, entry: Entry, parts: list[tuple[str, tuple[int, ...]]]) -> TensorInfo:
        first = self.keys[parts[0][0]]
        shapes = [tuple(self._tensor(key).size)[len(lead) :] for key, lead in parts]
        dtype, *others = {self._tensor(key).properties.dtype: None for key, _ in parts}
        if others:
            raise ConversionError(f"{entry} has sections in {dtype} and in {others[0]}: one dtype is wanted")
        split = first.place.row.split
        if first.section is None or not isinstance(split, Sectioned):
            return TensorInfo(shapes[0], dtype)
        parts.sort(key=lambda part: self.keys[part[0]].section or 0)
        if len(parts) != len(split.keys):
            missing = set(split.keys) - {split.keys[self.keys[key].section or 0] for key, _ in parts}
            raise ConversionError(f"{entry} lacks its sections {', '.join(sorted(missing))}")
        total = sum(shape[split.axis] for shape in shapes)
        return TensorInfo((*shapes[0][: split.axis], total, *shapes[0][split.axis + 1 :]), dtype)

    def _read_common(self) -> Common:
        legacy = self.folder / "common.pt"
        if legacy.is_file():
            state = torch.load(legacy, map_location="cpu", weights_only=False)
        else:
            state = self.object("common_state/shard_0_1")[0]
        if state.get("args") is None:
            raise ConversionError(f"{self.folder} stores no training arguments, so its model is unknown")
        rng = {}
        for key in self.metadata.state_dict_metadata:
            found = _RNG.match(key)
            if found:
                rng[int(found[1]), int(found[2])] = self.object(key)[0]
        return Common(state, rng, self.combined)

    def object(self, key: str) -> Any:
        """Return a stored object."""
        if not isinstance(self.metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            raise ConversionError(f"{self.folder} has no {key}: the checkpoint is not complete")
        info = self.metadata.storage_data[MetadataIndex(key)]
        return self.files.read_object(info.relative_path, info.offset, info.length)

    def parts_of(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...], MetadataIndex]]:
        """Return offsets, sizes and storage index of a stored tensor's chunks."""
        return self._places[key]

    def entries_of(self, key: str) -> list[Entry]:
        """Return the whole tensors that a stored tensor has a part of."""
        parsed = self.keys[key]
        shape = tuple(self._tensor(key).size)[: parsed.leading_axes]
        numbers = [dict(zip(parsed.leading_names, lead, strict=True)) for lead in _positions(shape)]
        return [Entry(parsed.place.at(**number).name, parsed.slot) for number in numbers]

    def read(self, entry: Entry) -> Tensor:
        """Return a whole tensor: contiguous, on the CPU, in its stored dtype."""
        info = self.entries[entry]
        parts = self._parts[entry]
        whole = torch.empty(info.shape, dtype=info.dtype)
        if len(parts) == 1:
            self._read_slice(parts[0][0], parts[0][1], whole)
            return whole
        split = self.keys[parts[0][0]].place.row.split
        assert isinstance(split, Sectioned)
        start = 0
        for key, lead in parts:
            length = tuple(self._tensor(key).size)[len(lead) :][split.axis]
            self._read_slice(key, lead, whole.narrow(split.axis, start, length))
            start += length
        return whole

    def rows(self, entry: Entry) -> StoredRows | None:
        """Return where a tensor's bytes are, None where it has to be read: it is not divided along one axis alone."""
        info = self.entries[entry]
        parts = self._parts[entry]
        if not info.nbytes or not info.shape or len(parts) > 1:
            return None
        ((key, lead),) = parts
        boxes = self._chunks_at(key, lead)
        count = len(lead)
        axes = {
            axis
            for _, sizes, _ in boxes
            for axis, (size, length) in enumerate(zip(sizes[count:], info.shape, strict=True))
            if size != length
        }
        if len(axes) > 1 or any(size != 1 for _, sizes, _ in boxes for size in sizes[:count]):
            return None
        axis = axes.pop() if axes else 0
        chunks = []
        for offsets, sizes, index in boxes:
            stored = self.metadata.storage_data[index]
            begin = self.files.data_offset(
                TensorInfo(tuple(sizes), info.dtype), stored.relative_path, stored.offset, stored.length
            )
            file = self.files.file(stored.relative_path)
            runs = ((offsets[count + axis], sizes[count + axis]),)
            chunks.append(FileChunk(str(file.name), file.fileno(), begin, runs))
        return StoredRows(info, axis, tuple(chunks)) if covers(chunks, info.shape[axis]) else None

    def _read_slice(self, key: str, lead: tuple[int, ...], target: Tensor) -> None:
        """Fill target with the stored tensor at the leading index."""
        filled, axes = 0, len(lead)
        for offsets, sizes, index in self._chunks_at(key, lead):
            view = target
            for axis, (at, size) in enumerate(zip(offsets[axes:], sizes[axes:], strict=True)):
                view = view.narrow(axis, at, size)
            info = self.metadata.storage_data[index]
            direct = view.is_contiguous() and all(size == 1 for size in sizes[:axes])
            chunk = view.view(sizes) if direct else torch.empty(sizes, dtype=target.dtype)
            self.files.read_into(chunk, info.relative_path, info.offset, info.length)
            if not direct:
                view.copy_(chunk[tuple(number - at for number, at in zip(lead, offsets[:axes], strict=True))])
            filled += view.numel()
        if filled != target.numel():
            raise ConversionError(f"{key} has {filled} of {target.numel()} elements: the checkpoint is not complete")

    def _chunks_at(
        self, key: str, lead: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], MetadataIndex]]:
        """Return the chunks that hold a part of the tensor at the leading index."""
        by_lead = self._by_lead.get(key)
        if by_lead is None:
            by_lead = self._by_lead[key] = {}
            for offsets, sizes, index in self._places[key]:
                for step in _positions(sizes[: len(lead)]):
                    at = tuple(offset + number for offset, number in zip(offsets[: len(lead)], step, strict=True))
                    by_lead.setdefault(at, []).append((offsets, sizes, index))
        return by_lead.get(lead, [])


def _positions(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _positions(shape[1:]):
            yield (first, *rest)
