"""Opens a checkpoint of either format for reading, and makes the writer of either format.

    with open_reader(Path("runs/mine/checkpoints")) as reader:          # or the folder of a step: step=100
        for entry in reader.entries: tensor = reader.read(entry)
    writer = make_writer("torch_dist", folder, entries, common, layout)

What always holds: a checkpoint that is opened is whole, file by file and weight by weight (companions.py), its tensors
have the table's shapes, and its stream layout is of a format that is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.training.checkpoints.checkpoint_state import Common, Entry, TensorInfo
from megatron.training.checkpoints.companions import flaw_of
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import model_sizes, shape_of
from megatron.training.checkpoints.plain_reader import PlainReader
from megatron.training.checkpoints.plain_writer import PlainWriter
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.sharded_style import ShardedStyle
from megatron.training.checkpoints.sharded_writer import ShardedWriter
from megatron.training.checkpoints.tensor_table import find_tensor
from megatron.training.resume.completeness import require_whole
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import CheckpointLocation, check_step, find_checkpoint
from megatron.training.wide_residual_checkpoint import check_format

FORMATS = ("torch_dist", "torch")

Reader = ShardedReader | PlainReader
Writer = ShardedWriter | PlainWriter


def locate(load: Path, step: int | None = None, *, whole: bool = True) -> CheckpointLocation:
    """Return where the checkpoint is that `load` (a run's --load) and the step name.

    Raises:
        ConversionError: it is not there or (unless `whole` is false) its files are not complete.
    """
    try:
        location = find_checkpoint(load, step)
        if whole:
            require_whole(location)
        return location
    except CheckpointError as error:
        raise ConversionError(str(error).replace("--ckpt-step", "--step").replace("--load ", "")) from error


def check_shapes(entries: Mapping[Entry, TensorInfo], sizes: Mapping[str, int]) -> None:
    """Raise ConversionError for a tensor whose shape is not the table's."""
    for entry, info in entries.items():
        wanted = shape_of(find_tensor(entry.name).row.shape, sizes)
        fits = len(wanted) == len(info.shape) and all(
            length is None or length == found for length, found in zip(wanted, info.shape, strict=True)
        )
        if not fits:
            shown = ", ".join("?" if length is None else str(length) for length in wanted)
            raise ConversionError(
                f"{entry} is {info}; [{shown}] is wanted: the stored arguments do not describe this checkpoint"
            )


def require_known_format(common: Common, folder: Path) -> None:
    """Raise ConversionError for a stream layout that another version wrote in a format of its own."""
    try:
        check_format(common.args, folder)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def require_own_step(common: Common, location: CheckpointLocation) -> None:
    """Raise ConversionError where the folder of a step holds the state of another one."""
    try:
        check_step(location, common.state)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def open_reader(
    load: Path, step: int | None = None, *, flaw_in: Callable[[Reader], str | None] | None = flaw_of
) -> Reader:
    """Open a checkpoint.

    Args:
        flaw_in: what finds its flaws: weight_flaw_of where optimizer states are not used, None to look for none.

    Raises:
        ConversionError: it is not there, damaged, not complete, has a tensor that the table does not know, or a stream
            layout of an unknown format.
    """
    location = locate(load, step)
    reader = ShardedReader(location.folder) if location.format == "torch_dist" else PlainReader(location.folder)
    try:
        require_known_format(reader.common, location.folder)
        require_own_step(reader.common, location)
        check_shapes(reader.entries, model_sizes(reader.common.args))
        if flaw_in is not None and (flaw := flaw_in(reader)) is not None:
            raise ConversionError(f"{location.folder} is not whole: {flaw}")
    except BaseException:
        reader.__exit__()
        raise
    return reader


def make_writer(
    format: str,
    folder: Path,
    entries: Mapping[Entry, TensorInfo],
    common: Common,
    layout: Layout,
    style: ShardedStyle | None = None,
) -> Any:
    """Return a writer of that format; `style` is for torch_dist only."""
    if format == "torch_dist":
        return ShardedWriter(folder, entries, common, layout, style)
    return PlainWriter(folder, entries, common, layout)
