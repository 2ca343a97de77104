"""One file of a plain checkpoint: its structure without its tensors' bytes, and those bytes one tensor at a time.

    file = RankFile.open(path)                   # file.state: the state dict, tensors without data
    file.read_into(file.state["model"][name], target)
    file = RankFile.create(path, state)          # state with tensors from `placeholder`; real ones are written at once
    file.write(tensor_of_state, values)

What always holds: a file that has been cut off is a ConversionError; what is written can be loaded with torch.load.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron.training.checkpoints.chunk_files import as_bytes
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.stored_rows import FileChunk, start_writing

_MODE = FakeTensorMode()


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without data, for RankFile.create."""
    with _MODE:
        return torch.empty(shape, dtype=dtype)


def _load_structure(path: Path) -> Any:
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    try:
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConversionError(f"{path} is not there: the checkpoint is not complete") from None
    except Exception as error:  # a file that has been cut off or overwritten raises anything
        raise ConversionError(
            f"{path} is damaged ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        ) from error


def _tensors(value: Any, other: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors at the same places of two structures."""
    if isinstance(value, Tensor):
        yield value, other
    elif isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key], other[key])
    elif isinstance(value, (list, tuple)):
        for one, two in zip(value, other, strict=True):
            yield from _tensors(one, two)


class RankFile:
    """An open file.

    Args:
        path: of model_optim_rng.pt.
        state: what torch.load returns, with tensors that have no data.
    """

    def __init__(self, path: Path, state: Any, flags: int) -> None:
        self.path, self.state = path, state
        self._size = path.stat().st_size
        self._descriptor = os.open(path, flags)
        self._written: dict[int, Tensor] = {}

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Open a file to read from."""
        return cls(path, _load_structure(path), os.O_RDONLY)

    @classmethod
    def create(cls, path: Path, state: Any) -> RankFile:
        """Make a file of the full size; tensors made by `placeholder` are filled in later, by write()."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
        file = cls(path, _load_structure(path), os.O_RDWR)
        for own, stored in _tensors(state, file.state):
            file._written[id(own)] = stored
            if not isinstance(own, FakeTensor):
                file._put(stored, own)
        return file

    def close(self, *, sync: bool = False) -> None:
        """Close it; `sync` makes sure that it is on the disk."""
        if self._descriptor >= 0:
            if sync:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _offset(self, stored: Tensor) -> int:
        offset = stored.untyped_storage()._checkpoint_offset
        if offset is None or not stored.is_contiguous():
            raise ConversionError(f"{self.path} has a tensor that does not lie in one piece")
        return int(offset) + int(stored.storage_offset()) * stored.itemsize

    def read_into(self, stored: Tensor, target: Tensor) -> None:
        """Fill target (contiguous, of the same shape and dtype) with the data of a tensor of `state`."""
        if target.numel() == 0:
            return
        buffer, offset, done = as_bytes(target), self._offset(stored), 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done : done + (64 << 20)]], offset + done)
            if not count:
                raise ConversionError(f"{self.path} ends in the middle of a tensor: it has been cut off")
            done += count

    def read(self, stored: Tensor) -> Tensor:
        """Return a tensor of `state` with its data."""
        target = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored, target)
        return target

    def with_data(self, value: Any) -> Any:
        """Return a part of `state` (dicts, lists, tuples) with the data of its tensors."""
        if isinstance(value, Tensor):
            return self.read(value)
        if isinstance(value, dict):
            return {key: self.with_data(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.with_data(item) for item in value)
        return value

    def write(self, own: Tensor, values: Tensor) -> None:
        """Fill in a tensor that was a placeholder in the state given to create()."""
        self._put(self._written[id(own)], values)

    def place_of(self, own: Tensor, runs: tuple[tuple[int, int], ...]) -> FileChunk:
        """Return where the data of a tensor belong that was a placeholder in the state given to create()."""
        return FileChunk(str(self.path), self._descriptor, self._offset(self._written[id(own)]), runs)

    def start_writing(self) -> None:
        """Let the kernel begin to put on the disk what has been written so far."""
        start_writing(self._descriptor)

    def _put(self, stored: Tensor, values: Tensor) -> None:
        if (stored.shape, stored.dtype) != (values.shape, values.dtype):
            raise ConversionError(f"{self.path}: {list(values.shape)} cannot be written over {list(stored.shape)}")
        if values.numel() == 0:
            return
        buffer, offset, done = as_bytes(values.contiguous()), self._offset(stored), 0
        while done < len(buffer):
            done += os.pwrite(self._descriptor, buffer[done : done + (64 << 20)], offset + done)
