"""The writer that upstream's trainer takes for TensorBoard's: files where a folder was given, and wandb beside it.

    writer = RunWriter("runs/a/tensorboard", queue_size=1000, seq_length=2048)
    writer.feed = feed                       # a wandb run, or None
    writer.add_scalar("lm loss", 3.2, 100)

Upstream logs most of its numbers to wandb only where a TensorBoard writer is there too, and some never. Here every
scalar reaches both, but for the second copies over samples. "tokens-per-second" is added to "iteration-time".

What always holds: a folder that cannot be written, or whose disk is full, is one warning; nothing is written after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from megatron.training.run_logs.wandb_feed import WandbFeed
from megatron.training.run_logs.warnings_once import warn_once

_OVER_SAMPLES = " vs samples"


@cache
def _silence_writer_threads() -> None:
    """Print no traceback of TensorBoard's own threads, once for this process: their errors reach the writer."""
    upstream = threading.excepthook

    def excepthook(args: Any) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            upstream(args)

    threading.excepthook = excepthook


class RunWriter(SummaryWriter):
    """A SummaryWriter by class, for upstream's isinstance, that holds one instead of being one.

    Args:
        folder: where TensorBoard's files go; None for none.
        queue_size: of TensorBoard's own queue.
        seq_length: tokens of a sample.
    """

    feed: WandbFeed | None = None

    def __init__(self, folder: str | None, queue_size: int, seq_length: int) -> None:
        self._folder = folder
        self._files: SummaryWriter | None = None
        self._seq_length = seq_length
        self._samples = 0
        if folder is None:
            return
        _silence_writer_threads()
        try:
            self._files = SummaryWriter(log_dir=folder, max_queue=queue_size)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        files, self._files = self._files, None
        warn_once("tensorboard", f"TensorBoard: cannot write to {self._folder} ({error}); nothing more is logged there")
        if files is not None:
            with suppress(Exception):  # of the same cause
                files.close()

    def _write(self, write: Callable[[SummaryWriter], Any]) -> None:
        if self._files is None:
            return
        try:
            write(self._files)
        except Exception as error:
            self._give_up(error)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **options: Any) -> None:
        """Write a number of a step."""
        self._write(lambda files: files.add_scalar(tag, scalar_value, global_step, *args, **options))
        if self.feed is not None and not tag.endswith(_OVER_SAMPLES):
            self.feed.log({tag: scalar_value}, global_step)
        if tag == "batch-size":
            self._samples = int(scalar_value)
        elif tag == "iteration-time" and self._samples and scalar_value > 0:
            self.add_scalar("tokens-per-second", self._samples * self._seq_length / scalar_value, global_step)

    def add_numbers(self, values: Mapping[str, float], step: int) -> None:
        """Write many numbers of a step as one event, at a tenth of the time that `add_scalar` takes for them."""
        event = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(lambda files: files._get_file_writer().add_summary(event, step))
        if self.feed is not None:
            self.feed.log(values, step)

    def add_text(self, *args: Any, **options: Any) -> None:
        """Write a text, to TensorBoard only: wandb has the configuration."""
        self._write(lambda files: files.add_text(*args, **options))

    def add_image(self, tag: str, img_tensor: Any, global_step: Any = None, *args: Any, **options: Any) -> None:
        """Write an image [height, width, 3] of bytes."""
        self._write(lambda files: files.add_image(tag, img_tensor, global_step, dataformats="HWC"))
        if self.feed is not None:
            self.feed.log_image(tag, img_tensor, global_step)

    def flush(self) -> None:
        """Write out what waits."""
        self._write(lambda files: files.flush())

    def close(self) -> None:
        """Write out what waits and close the files."""
        self._write(lambda files: files.close())
        self._files = None
