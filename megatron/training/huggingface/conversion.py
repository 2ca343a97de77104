"""Hugging Face folders into checkpoints and back, on disk: `convert.py import-hf` and `export-hf`.

    with HfFolder.open(Path("llama")) as folder:
        plan = plan_import(folder, host)
        execute(as_conversion(plan, folder), folder_reader(folder), Path("runs/llama"))
    with open_reader(Path("runs/llama")) as reader:
        export_checkpoint(plan_of_reader(reader, host), reader, Path("llama-out"))

Both take one tensor at a time. What always holds: everything is checked before the first byte is written; the result
gets its name when it is whole, and an error leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo, layer_bytes
from megatron.training.checkpoints.conversion import Outcome, Plan, Step
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import Reader
from megatron.training.checkpoints.progress import MemoryMeter, progress_bar
from megatron.training.checkpoints.widen import retention_note
from megatron.training.huggingface.export_plan import ExportPlan, plan_export, write_export
from megatron.training.huggingface.folder_reader import HfFolder
from megatron.training.huggingface.folder_writer import MAX_SHARD_BYTES, check_free
from megatron.training.huggingface.import_plan import ImportPlan
from megatron.training.huggingface.name_tables import TensorPair
from megatron.training.wide_residual_checkpoint import record_stream_layout

CHECKPOINT_VERSION = 3.0
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def folder_reader(folder: HfFolder) -> Any:
    """Return what `execute` wants of the source of a plan whose steps read for themselves."""
    return SimpleNamespace(entries={}, folder=folder.path)


def _common(plan: ImportPlan) -> Common:
    """What a release (no step) without optimizer state holds beside its tensors."""
    plan.args.no_save_optim = plan.args.no_save_rng = True
    if plan.model.is_wide:
        record_stream_layout(plan.args)
    state: dict[str, Any] = {"args": plan.args, "iteration": 0, "checkpoint_version": CHECKPOINT_VERSION}
    return Common(state | {"num_floating_point_operations_so_far": 0, "content_metadata": dict(_CONTENT)})


def _maker(plan: ImportPlan, folder: HfFolder, pair: TensorPair) -> Callable[[Tensor | None], Tensor]:
    return lambda _: plan.tensor(folder, pair)


def as_conversion(plan: ImportPlan, folder: HfFolder, format: str = "torch_dist") -> Plan:
    """Return an import as a conversion that can be printed and executed; `folder` stays open until then."""
    steps = [
        Step(
            Entry(pair.megatron),
            TensorInfo(pair.megatron_shape, plan.dtype_of(pair)),
            None,
            _maker(plan, folder, pair),
            f"from {plan.describe(pair)}:",
        )
        for pair in plan.pairs
    ]
    notes = [f"to train it, give its flags: {' '.join(plan.flags)}"]
    if plan.args.padded_vocab_size > plan.model.fields["vocab_size"]:
        rows = plan.args.padded_vocab_size - plan.model.fields["vocab_size"]
        notes.append(f"the vocabulary was padded by {rows} rows of zeros to {plan.args.padded_vocab_size}")
    inexact = None if plan.fresh is None else retention_note(plan.fresh)
    if inexact is not None:
        notes.append(f"not exactly the same function: {inexact}; --verify measures it")
    return Plan(f"import-hf: {folder.path}", steps, _common(plan), Layout(), format, notes=notes, inexact=inexact)


def plan_of_reader(reader: Reader, host: Any, *, like: Path | None = None, vocabulary: int | None = None) -> ExportPlan:
    """Return the export of an open checkpoint. Arguments and errors as plan_export."""
    return plan_export(reader.common.args, _weights(reader), host, like=like, vocabulary=vocabulary)


def _weights(reader: Reader) -> dict[str, TensorInfo]:
    return {entry.name: info for entry, info in reader.entries.items() if entry.slot == WEIGHT}


def export_lines(plan: ExportPlan, source: Path) -> Iterator[str]:
    """Yield an export, a line for each tensor of the folder."""
    yield f"export-hf: {source}"
    for pair in plan.pairs:
        for name, shape in zip(pair.hf, pair.hf_shapes, strict=True):
            dtype = str(plan.dtype_of(pair)).removeprefix("torch.")
            yield f"{name}  {dtype} {list(shape)}  from {pair.megatron} {list(pair.megatron_shape)}"


def export_checkpoint(
    plan: ExportPlan, reader: Reader, output: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Outcome:
    """Write a checkpoint's weights as a Hugging Face folder.

    Raises:
        ConversionError: a damaged checkpoint, a place that is taken, a full disk.
    """
    planned = plan.planned()
    total = sum(tensor.nbytes for tensor in planned)
    check_free(output, total)
    weights = _weights(reader)
    largest = layer_bytes({Entry(name): info for name, info in weights.items()})
    with MemoryMeter() as meter, progress_bar(total, "export-hf") as bar:

        def read(name: str) -> Tensor:
            meter.make_room(weights[name].nbytes, most=largest)
            return reader.read(Entry(name))

        write_export(plan, read, output, max_shard_bytes=max_shard_bytes, progress=bar.update)
    return Outcome(output, len(planned), total, meter.peak_bytes, largest)
