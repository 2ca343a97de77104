"""What wandb is told of checkpoints: step and path of the latest one as metadata; files only where that was asked for.

Upstream announces a checkpoint by making an artifact with a reference to its folder and logging it on `wandb.run`.
`CheckpointNote` and `RunOfCheckpoints` have the part of those interfaces that it uses.

What always holds: without --wandb-upload-checkpoints no file leaves the machine, and loading asks no server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

Send = Callable[[Callable[[Any], None]], None]


@dataclass
class CheckpointNote:
    """Stands where upstream has a wandb.Artifact."""

    name: str
    type: str = "model"
    metadata: dict[str, Any] = field(default_factory=dict)
    path: str | None = None

    def add_reference(self, uri: str, checksum: bool = True) -> None:
        """Note the checkpoint's folder."""
        del checksum
        self.path = urlparse(uri).path

    def add_file(self, path: str) -> None:
        """The tracker file says nothing that is not noted already."""


class RunOfCheckpoints:
    """Stands where upstream has `wandb.run`.

    Args:
        send: gets a function of wandb's real run and calls it in the thread of that run.
        project, entity: of the run.
        upload: whether checkpoints are uploaded whole.
    """

    def __init__(self, send: Send, project: str, entity: str | None, *, upload: bool) -> None:
        self._send = send
        self._upload = upload
        self.project = project
        self.entity = entity or ""

    def log_artifact(self, note: CheckpointNote, aliases: Sequence[str] = ()) -> None:
        """Tell wandb of a saved checkpoint."""
        step = note.metadata.get("iteration")
        self._send(lambda run: run.summary.update({"checkpoint/step": step, "checkpoint/path": note.path}))
        if self._upload and note.path is not None:
            path, names = note.path, list(aliases)

            def upload(run: Any) -> None:
                import wandb

                artifact = wandb.Artifact(note.name, type=note.type, metadata={**note.metadata, "path": path})
                artifact.add_dir(path)
                run.log_artifact(artifact, aliases=names)

            self._send(upload)

    def use_artifact(self, name: str) -> None:
        """Note which checkpoint the run started from."""
        self._send(lambda run: run.summary.update({"checkpoint/loaded": name}))
