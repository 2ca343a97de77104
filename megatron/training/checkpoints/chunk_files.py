"""Tensors inside the .distcp files of a torch_dist checkpoint: each is a torch.save archive at an offset.

    with ChunkFiles(folder) as files:
        files.read_into(tensor, "__0_0.distcp", offset, length)      # bytes go from the file into the tensor, once
        files.read_object("__0_0.distcp", offset, length)
    writer = ChunkWriter(folder)
    name, offset, length = writer.add_tensor(tensor)                  # or add_object(value), or copy(files, ...)

What always holds: an archive whose shape, dtype or size is not the expected one is a ConversionError; no second copy of
a tensor is made.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import TensorInfo
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.stored_rows import FileChunk, copy_bytes, start_writing
from megatron.training.checkpoints.tensor_archive import archive_around, is_served

_STORAGES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
}
_FILE_LIMIT = 8 << 30
"""A file of the writer is closed once it has grown past this many bytes."""


class _Slice(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._at += count
        return count


class _TensorDescription(pickle.Unpickler):
    """Reads what torch.save writes of a tensor, without its data."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, tuple(size), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return name
        raise ConversionError(f"a tensor is stored as {module}.{name}, which is no plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return _STORAGES[pid[1]], pid[2], pid[4]


def _contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _read_exactly(file: BinaryIO, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done : done + (64 << 20)])  # type: ignore[attr-defined]
        if not count:
            raise ConversionError(f"{file.name} ends in the middle of a tensor: it has been cut off")
        done += count


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += file.write(view[done:])


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {' '.join(str(error).split())[:200]}"


class ChunkFiles:
    """Open .distcp files of one folder, to read from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> ChunkFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def file(self, name: str) -> BinaryIO:
        """Return the open file."""
        if name not in self._open:
            try:
                self._open[name] = open(self.folder / name, "rb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise ConversionError(f"{self.folder / name} cannot be read: {error.strerror}") from error
        return self._open[name]

    def data_offset(self, info: TensorInfo, name: str, offset: int, length: int) -> int:
        """Return where in the file the data of a stored tensor begin, which has the wanted shape and dtype."""
        file = self.file(name)
        try:
            with zipfile.ZipFile(_Slice(file, offset, length)) as archive:
                start, description, size = _describe(archive)
        except ConversionError:
            raise
        except Exception as error:  # bytes that are no archive raise anything
            raise ConversionError(f"{self.folder / name} is damaged at byte {offset}: {_reason(error)}") from error
        (dtype, _, _), storage_offset, shape, stride = description
        wanted = (info.dtype, tuple(info.shape))
        if (dtype, shape) != wanted or storage_offset or not _contiguous(shape, stride):
            raise ConversionError(
                f"{self.folder / name} holds {str(dtype)[6:]} {list(shape)} at byte {offset}; .metadata says "
                f"{str(wanted[0])[6:]} {list(wanted[1])}"
            )
        if size != info.nbytes:
            raise ConversionError(f"{self.folder / name} holds {size} bytes at byte {offset}, another size is wanted")
        return offset + start

    def read_into(self, target: Tensor, name: str, offset: int, length: int) -> None:
        """Fill target, which is contiguous and has the stored shape and dtype."""
        begin = self.data_offset(TensorInfo(tuple(target.shape), target.dtype), name, offset, length)
        file = self.file(name)
        file.seek(begin)
        _read_exactly(file, as_bytes(target))

    def read_object(self, name: str, offset: int, length: int) -> Any:
        """Return what torch.save stored there."""
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()
        file = self.file(name)
        file.seek(offset)
        try:
            return torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
        except Exception as error:  # bytes that are no archive raise anything
            raise ConversionError(f"{self.folder / name} is damaged at byte {offset}: {_reason(error)}") from error


def _describe(archive: zipfile.ZipFile) -> tuple[int, Any, int]:
    """Return where the only storage of an archive starts, what the tensor is, and the storage's size."""
    records = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
    description = _TensorDescription(io.BytesIO(archive.read(records["data.pkl"]))).load()
    info = records[f"data/{description[0][1]}"]
    raw = archive.fp
    assert raw is not None
    raw.seek(info.header_offset)
    header = raw.read(30)  # a local file header: lengths of the name and of the extra field are at bytes 26 and 28
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + names, description, info.file_size


class ChunkWriter:
    """Writes .distcp files: `__0_0.distcp`, `__0_1.distcp`, ..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[BinaryIO] = []

    def _current(self) -> tuple[str, BinaryIO]:
        if not self._files or self._files[-1].tell() > _FILE_LIMIT:
            name = f"__0_{len(self._files)}.distcp"
            self._files.append(open(self.folder / name, "wb", buffering=0))  # noqa: SIM115
        return f"__0_{len(self._files) - 1}.distcp", self._files[-1]

    def _save(self, value: Any) -> tuple[str, int, int]:
        name, file = self._current()
        offset = file.tell()
        torch.save(value, file)
        return name, offset, file.tell() - offset

    def add_tensor(self, tensor: Tensor) -> tuple[str, int, int]:
        """Write a tensor; returns file, offset and length."""
        tensor = tensor.detach().contiguous()
        if not is_served(tensor):
            return self._save(tensor.clone())  # a view would be saved with its whole storage
        before, after = archive_around(tensor)
        name, file = self._current()
        offset = file.tell()
        for part in (before, as_bytes(tensor), after):
            _write_all(file, part)
        return name, offset, file.tell() - offset

    def reserve(self, tensor: Tensor, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[str, int, int], FileChunk]:
        """Write all but the data of a tensor that is_served (it may have none); returns also where they belong."""
        before, after = archive_around(tensor)
        name, file = self._current()
        offset = file.tell()
        _write_all(file, before)
        data = file.tell()
        file.seek(data + tensor.numel() * tensor.itemsize)
        _write_all(file, after)
        return (name, offset, file.tell() - offset), FileChunk(str(self.folder / name), file.fileno(), data, runs)

    def add_object(self, value: Any) -> tuple[str, int, int]:
        """Write anything that torch.save takes."""
        return self._save(value)

    def copy(self, files: ChunkFiles, parts: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """Copy stored archives as they are."""
        copied = []
        for name, offset, length in parts:
            target, file = self._current()
            start = file.tell()
            source = files.file(name)
            copy_bytes(FileChunk(str(source.name), source.fileno(), offset, ()), offset, file.fileno(), start, length)
            file.seek(start + length)
            copied.append((target, start, length))
        return copied

    def start_writing(self) -> None:
        """Let the kernel begin to put on the disk what has been written so far."""
        for file in self._files:
            start_writing(file.fileno())

    def close(self) -> None:
        """Close the files and make sure that they are on the disk."""
        for file in self._files:
            if not file.closed:
                os.fsync(file.fileno())
                file.close()
