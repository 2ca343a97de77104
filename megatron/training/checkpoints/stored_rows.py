"""Where a tensor's bytes stand in files, and their copy from the files of one layout into those of another.

    rows = reader.rows(entry)            # None: the tensor has to be read
    writer.write_rows(entry, rows)       # False: the tensor has to be written
    copy_rows(rows, chunks, axis)

A tensor of shape [..., axis, ...] is divided along one axis at most. Where that is the first axis (or those before it
have length 1), a part is one range of bytes and is copied inside the kernel; else blocks of about _BLOCK bytes pass
through a buffer that stays in the processor's cache.

What always holds: every byte of the target is written once, from the one place of the source that holds it; no more
than a few blocks are in memory.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from megatron.training.checkpoints.checkpoint_state import TensorInfo
from megatron.training.checkpoints.errors import ConversionError

_BLOCK = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2  # of Linux: begin to write dirty pages, wait for none


@dataclass(frozen=True)
class FileChunk:
    """A part of a tensor that lies in one piece in an open file.

    Args:
        path: of the file, for messages.
        descriptor: of the file.
        offset: of its first byte.
        runs: what it holds of the tensor's axis, (start, length) after (start, length).
    """

    path: str
    descriptor: int
    offset: int
    runs: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """Its length along the axis."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True)
class StoredRows:
    """A whole tensor in files: its chunks are disjoint and cover it, divided along `axis`."""

    info: TensorInfo
    axis: int
    chunks: tuple[FileChunk, ...]

    def along(self, axis: int) -> StoredRows | None:
        """Return the same with another axis, where that changes nothing: it is in one chunk."""
        if axis == self.axis:
            return self
        if len(self.chunks) > 1:
            return None
        (chunk,) = self.chunks
        return StoredRows(
            self.info, axis, (FileChunk(chunk.path, chunk.descriptor, chunk.offset, ((0, self.info.shape[axis]),)),)
        )


def covers(chunks: Sequence[FileChunk], length: int) -> bool:
    """Whether the runs of the chunks are disjoint and cover the axis."""
    at = 0
    for start, count in sorted(run for chunk in chunks for run in chunk.runs):
        if start != at:
            return False
        at += count
    return at == length


def copy_rows(source: StoredRows, target: Sequence[FileChunk]) -> None:
    """Copy a tensor into chunks that are divided along the same axis; chunks of replicas may hold the same runs."""
    shape, axis = source.info.shape, source.axis
    outer = math.prod(shape[:axis])
    inner = math.prod(shape[axis + 1 :]) * source.info.dtype.itemsize
    if outer == 1:
        _copy_ranges(source.chunks, target, inner)
    else:
        _copy_blocks(source.chunks, target, outer, shape[axis], inner)


def _copy_ranges(source: Sequence[FileChunk], target: Sequence[FileChunk], inner: int) -> None:
    for to in target:
        at = to.offset
        for start, length in to.runs:
            for chunk, chunk_start, chunk_length, position in _located(source):
                low, high = max(start, chunk_start), min(start + length, chunk_start + chunk_length)
                if low < high:
                    begin = chunk.offset + (position + low - chunk_start) * inner
                    copy_bytes(chunk, begin, to.descriptor, at + (low - start) * inner, (high - low) * inner)
            at += length * inner


def _located(chunks: Sequence[FileChunk]) -> list[tuple[FileChunk, int, int, int]]:
    """Return every run with its chunk, start, length and position in the chunk."""
    found = []
    for chunk in chunks:
        position = 0
        for start, length in chunk.runs:
            found.append((chunk, start, length, position))
            position += length
    return found


def copy_bytes(source: FileChunk, begin: int, descriptor: int, at: int, count: int) -> None:
    """Copy bytes from one file to another, inside the kernel where it can."""
    done = 0
    while done < count:
        try:
            copied = os.copy_file_range(source.descriptor, descriptor, count - done, begin + done, at + done)
        except OSError:  # another file system, or one that cannot
            block = os.pread(source.descriptor, min(_BLOCK, count - done), begin + done)
            copied = os.pwrite(descriptor, block, at + done)
        if not copied:
            raise ConversionError(f"{source.path} ends at byte {begin + done}: it has been cut off")
        done += copied


def _copy_blocks(source: Sequence[FileChunk], target: Sequence[FileChunk], outer: int, length: int, inner: int) -> None:
    rows = max(1, min(outer, _BLOCK // (length * inner)))
    whole = np.empty((rows, length, inner), np.uint8)
    own = {chunk.width: np.empty((rows, chunk.width, inner), np.uint8) for chunk in (*source, *target)}
    for first in range(0, outer, rows):
        count = min(rows, outer - first)
        block = whole[:count]
        for chunk in source:
            part = block if chunk.runs == ((0, length),) else own[chunk.width][:count]
            _read(chunk, chunk.offset + first * chunk.width * inner, part)
            if part is not block:
                _spread(part, block, chunk.runs)
        for chunk in target:
            part = block
            if chunk.runs != ((0, length),):
                part = own[chunk.width][:count]
                _gather(block, part, chunk.runs)
            _write(chunk, chunk.offset + first * chunk.width * inner, part)


def _spread(part: np.ndarray, block: np.ndarray, runs: Sequence[tuple[int, int]]) -> None:
    at = 0
    for start, length in runs:
        block[:, start : start + length] = part[:, at : at + length]
        at += length


def _gather(block: np.ndarray, part: np.ndarray, runs: Sequence[tuple[int, int]]) -> None:
    at = 0
    for start, length in runs:
        part[:, at : at + length] = block[:, start : start + length]
        at += length


def _read(chunk: FileChunk, offset: int, part: np.ndarray) -> None:
    view, done = memoryview(part).cast("B"), 0
    while done < len(view):
        count = os.preadv(chunk.descriptor, [view[done:]], offset + done)
        if not count:
            raise ConversionError(f"{chunk.path} ends at byte {offset + done}: it has been cut off")
        done += count


def _write(chunk: FileChunk, offset: int, part: np.ndarray) -> None:
    view, done = memoryview(part).cast("B"), 0
    while done < len(view):
        done += os.pwrite(chunk.descriptor, view[done:], offset + done)


def axis_runs(pieces: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Return the runs of pieces that were taken from positions along an axis (`positions`)."""
    return tuple((int(piece.reshape(-1)[0]), piece.numel()) for piece in pieces)


def positions(shape: Sequence[int], axis: int) -> torch.Tensor:
    """Return the numbers along an axis, as a tensor that has length 1 along the others."""
    return torch.arange(shape[axis]).reshape([shape[axis] if at == axis else 1 for at in range(len(shape))])


def start_writing(descriptor: int) -> None:
    """Let the kernel begin to put a file's new bytes on the disk, so that the final fsync finds little to wait for."""
    with suppress(OSError, AttributeError):  # only Linux has it; without it the bytes wait for fsync
        zero = ctypes.c_int64(0)
        ctypes.CDLL(None).sync_file_range(descriptor, zero, zero, _SYNC_FILE_RANGE_WRITE)
