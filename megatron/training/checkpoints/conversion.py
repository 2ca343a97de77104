"""A conversion as a plan that can be printed, and its execution, tensor by tensor.

    plan = plan_widen(reader, ...)                       # widen.py, resize.py, rekey.py, reshard.py make plans
    for line in plan.lines(): print(line)                # --dry-run
    result = execute(plan, reader, target, overwrite=False)

What always holds: every tensor of the result has one Step, every tensor of the source is the source of a Step or named
in `dropped`; a stored tensor that does not change is copied as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo, layer_bytes
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import Reader, make_writer
from megatron.training.checkpoints.output_folder import new_checkpoint
from megatron.training.checkpoints.progress import MemoryMeter, progress_bar, reuse_memory
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.sharded_style import ShardedStyle
from megatron.training.checkpoints.sharded_writer import ShardedWriter
from megatron.training.checkpoints.tensor_table import find_tensor, registration_order

_WRITE_BACK = 64 << 20
"""After so many bytes the disk is told to begin."""


@dataclass(frozen=True)
class Step:
    """How one tensor of the result comes about.

    Args:
        entry, info: what is written.
        source: what is read; None for a tensor that is created.
        make: from the source (or None) to the tensor; None: it is copied.
        action: a word for the plan.
    """

    entry: Entry
    info: TensorInfo
    source: Entry | None = None
    make: Callable[[Tensor | None], Tensor] | None = None
    action: str = "copy"


def copy_step(entry: Entry, info: TensorInfo) -> Step:
    """Return the step that keeps a tensor as it is."""
    return Step(entry, info, entry)


@dataclass
class Plan:
    """A conversion.

    Args:
        title: what it does, in a line.
        steps: in the order in which they are done.
        common: what the result holds beside its tensors.
        layout, format, style: of the result.
        dropped: tensors of the source that the result does not have.
        notes: what a user should know about the result.
        keeps_parts: tensors are stored in the parts that the source stores.
        keeps_buckets: the optimizer's buckets, which name no tensors, stay valid.
        inexact: why the result does not compute what the source does; None where it does.
    """

    title: str
    steps: list[Step]
    common: Common
    layout: Layout
    format: str
    style: ShardedStyle | None = None
    dropped: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keeps_parts: bool = True
    keeps_buckets: bool = False
    inexact: str | None = None

    @property
    def entries(self) -> dict[Entry, TensorInfo]:
        """What the result holds."""
        return {step.entry: step.info for step in self.steps}

    @property
    def nbytes(self) -> int:
        """Bytes of the result's tensors."""
        return sum(step.info.nbytes for step in self.steps)

    def lines(self) -> Iterator[str]:
        """Yield the plan, a line for each tensor."""
        yield self.title
        for step in self.steps:
            renamed = "" if step.source in (None, step.entry) else f"  from {step.source}"
            yield f"{step.action:<7} {step.entry}  {step.info}{renamed}"
        for entry in self.dropped:
            yield f"drop    {entry}"
        for note in self.notes:
            yield f"note: {note}"


@dataclass(frozen=True)
class Outcome:
    """What a conversion did: bytes of tensors, the process's peak memory above its start, the largest layer's bytes."""

    folder: Path
    tensors: int
    nbytes: int
    peak_bytes: int
    largest_layer: int


def ordered(steps: list[Step]) -> list[Step]:
    """Return the steps in the order of the model, weights first, then slot by slot."""
    return sorted(steps, key=lambda step: (step.entry.slot, registration_order(step.entry.name)))


def refuse_buckets(reader: Reader, what: str) -> None:
    """Raise ConversionError when the optimizer state is in buckets that name no tensors."""
    if reader.bucket_keys:
        raise ConversionError(
            f"{reader.folder} stores its optimizer state in the distributed optimizer's buckets, which {what} cannot "
            "take apart: save it with --dist-ckpt-optim-fully-reshardable, or convert with --weights-only"
        )


def check_accounted(plan: Plan, reader: Reader) -> None:
    """Raise ConversionError when a tensor of the source is neither used nor dropped by name."""
    left = set(reader.entries) - {step.source for step in plan.steps if step.source} - set(plan.dropped)
    if left:
        raise ConversionError(f"{len(left)} tensors would be lost, {min(left)} among them")


def execute(
    plan: Plan, reader: Reader, target: Path, *, overwrite: bool = False, progress: bool | None = None
) -> Outcome:
    """Write the result of a plan as a folder of checkpoints.

    Raises:
        ConversionError: a damaged source, a place that is taken, a full disk.
    """
    check_accounted(plan, reader)
    reuse_memory()
    iteration = plan.common.iteration or None  # step 0 is a release: upstream's tracker knows no step 0
    room = plan.nbytes + (64 << 20)
    with (
        MemoryMeter() as meter,
        new_checkpoint(target, iteration, overwrite=overwrite, room=room) as folder,
        progress_bar(plan.nbytes, plan.title.split(":")[0], shown=progress) as bar,
    ):
        writer = make_writer(plan.format, folder, plan.entries, plan.common, plan.layout, plan.style)
        try:
            _write(plan, reader, writer, bar, meter)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
    return Outcome(target, len(plan.steps), plan.nbytes, meter.peak_bytes, layer_bytes(plan.entries))


def _write(plan: Plan, reader: Reader, writer: Any, bar: Any, meter: MemoryMeter) -> None:
    done: set[Entry] = set()
    most = layer_bytes(plan.entries)
    if isinstance(reader, ShardedReader) and isinstance(writer, ShardedWriter):
        done = _copy_stored(plan, reader, writer, bar)
    waiting = 0
    for step in plan.steps:
        if step.entry in done:
            continue
        waiting += step.info.nbytes
        if waiting > _WRITE_BACK:
            writer.start_writing()
            waiting = 0
        if _copied_in_files(step, reader, writer):
            bar.update(step.info.nbytes)
            continue
        meter.make_room(step.info.nbytes, most=most)
        source = None if step.source is None else reader.read(step.source)
        if step.make is not None:
            tensor = step.make(source)
        else:
            assert source is not None
            tensor = source
        del source
        writer.write(step.entry, tensor)
        del tensor
        bar.update(step.info.nbytes)


def _copied_in_files(step: Step, reader: Reader, writer: Any) -> bool:
    """Copy a tensor that does not change from file to file, where its bytes can be found without reading it."""
    if step.make is not None or step.source is None or not isinstance(reader, ShardedReader):
        return False
    rows = reader.rows(step.source)
    return rows is not None and writer.write_rows(step.entry, rows)


def _copy_stored(plan: Plan, reader: ShardedReader, writer: ShardedWriter, bar: Any) -> set[Entry]:
    """Copy what does not change as it is stored; returns the tensors that are complete with it."""
    writer.copy_extra_states(reader)
    kept = {step.entry for step in plan.steps if step.make is None and step.source == step.entry}
    if "rerun_state_machine" in plan.common.state:
        for key in reader.metadata.state_dict_metadata:
            if key.startswith("rerun_state_machine_state/"):
                writer.copy_object(reader, key)
    if reader.bucket_keys and plan.keeps_buckets:
        for key in reader.bucket_keys:
            writer.copy_stored(reader, key, key)
    if not plan.keeps_parts:
        return set()
    done: set[Entry] = set()
    for key, parsed in reader.keys.items():
        entries = reader.entries_of(key)
        if not kept.issuperset(entries):
            continue
        new_key = key
        if parsed.place.row.controller:
            new_key = writer.style.key(parsed.place, parsed.slot, routed=False)
        writer.copy_key(reader, key, new_key)
        before = len(done)
        done.update(entries)
        if len(done) > before:
            bar.update(sum(reader.entries[entry].nbytes for entry in entries))
    return done


def weights_only(reader: Reader, plan: Plan) -> None:
    """Take the optimizer's states out of a plan."""
    plan.dropped += [entry for entry in reader.entries if entry.slot != WEIGHT]
    plan.steps = [step for step in plan.steps if step.entry.slot == WEIGHT]
    plan.common = plan.common.without_optimizer()
    plan.keeps_buckets = False
    plan.notes.append("optimizer states were left out: a run that loads it starts them afresh")


def zeros(info: TensorInfo) -> Callable[[Tensor | None], Tensor]:
    """Return the maker of a tensor of zeros."""
    return lambda _: torch.zeros(info.shape, dtype=info.dtype)


def stream_place(name: str) -> bool:
    """Whether a tensor is a controller of wide streams."""
    return find_tensor(name).row.controller is not None
