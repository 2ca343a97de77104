"""Writes tokenized documents as Megatron's .bin/.idx pairs so that a final name never holds a half-written file.

    with OutputFolder(prefix, keys, dtype, overwrite=False) as output:
        shard = output.new_shard(); shard.add("text", ids, lengths); shard.close()
        output.commit([shard])                   # <prefix>_text_document.bin and .idx now exist

What always holds: everything is written in a hidden folder beside the target and renamed into place at the end, .bin
first and .idx last (a .bin alone is no dataset to any reader). Whatever ends the run before that, also ^C and SIGTERM,
leaves earlier files as they were; the folder is removed. After a SIGKILL the hidden folder stays and is harmless.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron.training.data.errors import DataError


def output_stem(prefix: str, key: str) -> str:
    """Return the path without suffix under which Megatron's tools write and look for the documents of one key."""
    return f"{prefix}_{key}_document"


class Shard:
    """The documents of one part of the input: one .bin/.idx pair per key."""

    def __init__(self, folder: str, keys: Sequence[str], dtype: type[np.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.stems = {key: os.path.join(folder, str(number)) for number, key in enumerate(keys)}
        os.mkdir(folder)
        self._builders: dict[str, Any] = {
            key: IndexedDatasetBuilder(stem + ".bin", dtype=dtype) for key, stem in self.stems.items()
        }

    def add(self, key: str, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: `ids` (all of them joined, 1-D, any integer dtype that holds them) and their lengths."""
        builder = self._builders[key]
        start = 0
        for length in lengths.tolist():
            builder.add_document(ids[start : start + length], [length])
            start += length

    def append(self, other: Shard) -> None:
        """Append all documents of another, closed shard."""
        for key, builder in self._builders.items():
            builder.add_index(other.stems[key])

    def close(self) -> None:
        """Write the indices; after this the pair is complete."""
        for key, builder in self._builders.items():
            builder.finalize(self.stems[key] + ".idx")


class OutputFolder:
    """The hidden folder beside the output prefix; a context manager that always removes it again."""

    def __init__(self, prefix: str, keys: Sequence[str], dtype: type[np.number], *, overwrite: bool) -> None:
        self._keys = keys
        self._dtype = dtype
        self._targets = {key: output_stem(prefix, key) for key in keys}
        check_outputs(prefix, keys, overwrite=overwrite)
        self._parent = Path(prefix).absolute().parent
        self._name = Path(prefix).name
        self._shards = 0

    def __enter__(self) -> OutputFolder:
        self._parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix=f".{self._name}.unfinished-", dir=self._parent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._folder)

    def new_shard(self) -> Shard:
        """Open the next shard; parts of the input may fill several at the same time."""
        self._shards += 1
        return Shard(os.path.join(self._folder, str(self._shards)), self._keys, self._dtype)

    def commit(self, shards: Sequence[Shard]) -> dict[str, str]:
        """Join closed shards in order, put the result under the final names and return {key: path without suffix}."""
        joined = shards[0]
        if len(shards) > 1:
            joined = self.new_shard()
            for shard in shards:
                joined.append(shard)
            joined.close()
        with _signals_wait():
            for stem in self._targets.values():  # with --overwrite: an old .idx must never point into a new .bin
                Path(stem + ".idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                for key, stem in self._targets.items():
                    os.replace(joined.stems[key] + suffix, stem + suffix)
        return self._targets


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let ^C and SIGTERM wait for the end of the block: the renames take no time and belong together.

    Python runs signal handlers in the main thread, whichever thread the system interrupts, so only there is one needed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda caught, _: waiting.append(caught)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for caught in waiting:
            signal.raise_signal(caught)


def check_outputs(prefix: str, keys: Sequence[str], *, overwrite: bool) -> None:
    """Raise DataError when an output exists and may not be replaced, or when the prefix cannot be written."""
    for key in keys:
        if os.sep in key:
            raise DataError(f"--json-keys {key}: a key becomes part of a file name, so it may hold no {os.sep}.")
        for path in (output_stem(prefix, key) + suffix for suffix in (".bin", ".idx")):
            if os.path.isdir(path):
                raise DataError(f"{path} is a folder; choose another --output-prefix.")
            if os.path.exists(path) and not overwrite:
                raise DataError(
                    f"{path} exists and stays as it is; choose another --output-prefix or give --overwrite."
                )
    if os.path.basename(prefix) == "":
        raise DataError(f"--output-prefix {prefix} ends in a slash; give a name behind it, for example {prefix}corpus.")
