"""A Hugging Face folder, written tensor by tensor: shapes are known first, so a file's header stands before its data.

    plan = [Planned("model.norm.weight", (64,), torch.float32), ...]
    with unfinished_folder(Path("out")) as folder:
        with SafetensorsWriter(folder, plan) as writer:
            writer.write("model.norm.weight", tensor)      # in the order of the plan

safetensors' own save functions want all tensors of a file at once; the format (eight bytes with the length of a JSON
header, the header, the data without gaps) needs one at a time.

What always holds: at most one tensor is held; the folder gets its name when everything has been written, and an error
or an interruption before leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
import torch
from torch import Tensor

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.folder_reader import INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _shards(plan: Sequence[Planned], limit: int) -> list[list[Planned]]:
    """Cut the plan so that no file is larger than limit, but for a single tensor that is."""
    shards: list[list[Planned]] = [[]]
    held = 0
    for planned in plan:
        if shards[-1] and held + planned.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(planned)
        held += planned.nbytes
    return shards


def _header(shard: Sequence[Planned]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        header[planned.name] = {
            "dtype": DTYPE_NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [offset, offset + planned.nbytes],
        }
        offset += planned.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter:
    """Writes planned tensors, in their order, into one file or into shards with an index."""

    def __init__(self, folder: Path, plan: Sequence[Planned], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder = folder
        self._shards = _shards(plan, max_shard_bytes)
        self._order = iter([(number, planned) for number, shard in enumerate(self._shards) for planned in shard])
        self._file: IO[bytes] | None = None
        self._open_number = -1

    def _name(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor of the plan; anything else is a programming error and raises ValueError."""
        number, planned = next(self._order)
        found = Planned(name, tuple(tensor.shape), tensor.dtype)
        if found != planned:
            raise ValueError(f"{planned} is the next tensor to write, {found} was given")
        if number != self._open_number:
            self._close_file()
            self._file = open(self._folder / self._name(number), "xb")  # noqa: SIM115 - open over several calls
            self._open_number = number
            self._file.write(_header(self._shards[number]))
        assert self._file is not None
        self._file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; without an error, check that all is written and write the index."""
        self._close_file()
        if kind is not None:
            return
        left = next(self._order, None)
        if left is not None:
            raise ValueError(f"{left[1].name} was not written")
        if len(self._shards) > 1:
            names = {planned.name: self._name(n) for n, shard in enumerate(self._shards) for planned in shard}
            total = sum(planned.nbytes for shard in self._shards for planned in shard)
            index = {"metadata": {"total_size": total}, "weight_map": names}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _remove_left_overs(path: Path) -> None:
    """Remove what exports to this place have left that were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.unfinished-(\d+)")
    for entry in path.parent.iterdir():
        found = pattern.fullmatch(entry.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(entry, ignore_errors=True)


def check_absent(path: Path) -> None:
    """Raise HuggingFaceError when something is at `path`."""
    if path.exists():
        raise HuggingFaceError(f"{path} is there already: give a folder that is not, or remove it.")


def check_free(path: Path, nbytes: int) -> None:
    """Raise HuggingFaceError unless the disk that `path` will be on has room for so many bytes."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise HuggingFaceError(f"{nbytes:,} bytes are wanted for {path}, {free:,} are free there.")


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` that gets this name on leaving; on an error it is removed.

    Raises:
        HuggingFaceError: something is at `path` already, or the disk is full.
    """
    check_absent(path)
    beside = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_overs(path)
        beside.mkdir()
        yield beside
        beside.rename(path)
    except OSError as error:
        raise HuggingFaceError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
