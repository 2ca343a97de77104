"""The bytes around a tensor's own in a torch.save archive, so that a tensor is written without a second copy.

    before, after = archive_around(tensor)
    file.write(before); file.write(memory_of(tensor)); file.write(after)         # torch.load reads it

What always holds: torch.load gives the tensor back. The checksum of its data is not computed (as with
`torch.serialization.set_crc32_options(False)`): torch.load looks at none, and it would take most of the time.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
LARGEST = 2 << 30
"""Tensors above this many bytes need the 64-bit form of the archive, which is left to torch.save."""


_STORAGE_CLASSES = {
    **{torch.float32: "FloatStorage", torch.float64: "DoubleStorage", torch.float16: "HalfStorage"},
    **{torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage"},
    **{torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage"},
}


class _DataRecord:
    """Stands for the storage in the pickle."""


class _Described:
    """Pickles as a contiguous tensor whose storage is the record data/0."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        stride, step = [], 1
        for length in reversed(shape):
            stride.append(step)
            step *= length
        self._arguments: tuple[Any, ...] = (_DataRecord(), 0, shape, tuple(reversed(stride)), False, OrderedDict())

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self._arguments


class _Pickler(pickle.Pickler):
    """Names the storage as torch.save does."""

    def __init__(self, file: io.BytesIO, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file, protocol=2)
        self._storage = ("storage", getattr(torch, _STORAGE_CLASSES[dtype]), "0", "cpu", numel)

    def persistent_id(self, obj: Any) -> Any:
        return self._storage if isinstance(obj, _DataRecord) else None


def _description(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Return the record data.pkl."""
    file = io.BytesIO()
    _Pickler(file, dtype, math.prod(shape)).dump(_Described(shape))
    return file.getvalue()


def _local(name: str, size: int, crc: int, extra: bytes) -> bytes:
    header = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, crc, size, size, len(name), len(extra))
    return header + name.encode() + extra


def _central(name: str, size: int, crc: int, offset: int) -> bytes:
    fields = (20, 20, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + name.encode()


def _padding(position: int, name: str) -> bytes:
    """Return the extra field that lets a record's data begin at a multiple of 64."""
    fill = -(position + 30 + len(name) + 4) % _ALIGNMENT
    return b"FB" + struct.pack("<H", fill) + b"Z" * fill


@lru_cache(maxsize=256)
def _around(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    records = {
        "archive/data.pkl": _description(shape, dtype),
        "archive/.format_version": b"1",
        "archive/.storage_alignment": str(_ALIGNMENT).encode(),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    before, directory = b"", b""
    for name, data in records.items():
        crc = zlib.crc32(data)
        directory += _central(name, len(data), crc, len(before))
        before += _local(name, len(data), crc, _padding(len(before), name)) + data
    size = dtype.itemsize * math.prod(shape)
    name = "archive/data/0"
    directory += _central(name, size, 0, len(before))
    before += _local(name, size, 0, _padding(len(before), name))
    count = len(records) + 1
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(before) + size, 0)
    return before, directory + end


def is_served(tensor: Tensor) -> bool:
    """Whether archive_around can be used; torch.save serves every tensor."""
    return (
        tensor.numel() * tensor.itemsize <= LARGEST and tensor.dtype in _STORAGE_CLASSES and sys.byteorder == "little"
    )


def archive_around(tensor: Tensor) -> tuple[bytes, bytes]:
    """Return what stands before and after the data of a contiguous tensor that is_served."""
    return _around(tuple(tensor.shape), tensor.dtype)
