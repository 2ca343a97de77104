"""Read back what wandb keeps on the disk of an offline run, and train in this process with an environment of its own.

    run = read_offline_run(folder)        # the one offline-run-* below folder
    run.id, run.group, run.tags, run.config["streams"], run.rows[3]["lm loss"], run.summary["checkpoint/step"]

wandb's own reader is no part of its Python package, so this reads the file: LevelDB's log format (records of 7-byte
headers in blocks of 32 KiB, after a file header of 7 bytes) of protocol buffers.

What always holds: a file that ends in the middle of a record gives what is whole.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7
_FULL, _LAST = 1, 4


@dataclass
class StagedFile:
    """A file of an artifact: its name there, and where its content lies until it is uploaded."""

    name: str
    path: str


@dataclass
class Artifact:
    """What a run wants uploaded."""

    aliases: list[str]
    files: list[StagedFile]


@dataclass
class OfflineRun:
    """One start of a wandb run."""

    id: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)
    exit_code: int | None = None


def _records(file: Path) -> Iterator[bytes]:
    data, position, parts = file.read_bytes(), _HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + _HEADER])
        if kind == 0 or position + _HEADER + length > len(data):
            return
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def offline_folders(folder: Path) -> list[Path]:
    """The starts below a folder, in their order."""
    return sorted(folder.rglob("offline-run-*"))


def read_offline_run(folder: Path) -> OfflineRun:
    """The run in a folder of one start, or the only one below."""
    from wandb.proto import wandb_internal_pb2

    files = list(folder.rglob("run-*.wandb"))
    assert len(files) == 1, f"one wandb run is wanted below {folder}, found {files}"
    run = OfflineRun()
    for data in _records(files[0]):
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found = record.run
            run.id, run.project, run.group, run.job_type = found.run_id, found.project, found.run_group, found.job_type
            run.tags = list(found.tags)
            run.config |= _items(found.config.update)
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "history":
            run.steps.append(record.history.step.num)
            run.rows[record.history.step.num] = _items(record.history.item)
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "artifact":
            staged = [StagedFile(entry.path, entry.local_path) for entry in record.artifact.manifest.contents]
            run.artifacts.append(Artifact(list(record.artifact.aliases), staged))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


@contextmanager
def wandb_environment(**variables: str) -> Iterator[None]:
    """An environment with these variables of wandb's and no others, for training in this process."""
    import wandb

    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"} | variables)
    wandb.teardown()  # it keeps the environment of its first use
    try:
        yield
    finally:
        wandb.teardown()
        os.environ.clear()
        os.environ.update(before)
