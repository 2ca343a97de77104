"""What a checkpoint holds, as a dict (--json) or as lines.

    report = inspect_checkpoint(Path("runs/mine/checkpoints"))
    report["streams"]["num_streams"], report["controllers"]["decoder.layers.0...."]["factors"]

What always holds: no weight is read but the controllers; a checkpoint that is not whole, for files or optimizer states
that are missing, is reported as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.training.checkpoints.checkpoint_state import WEIGHT, TensorInfo
from megatron.training.checkpoints.companions import flaw_of
from megatron.training.checkpoints.controllers import active, factors
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import Reader, locate, open_reader
from megatron.training.checkpoints.sharded_style import hybrid_pattern
from megatron.training.checkpoints.tensor_table import find_tensor
from megatron.training.checkpoints.widen import stored_streams
from megatron.training.resume.completeness import damage_of


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _elements(info: TensorInfo) -> int:
    return info.nbytes // info.dtype.itemsize


def _tensors(reader: Reader) -> dict[str, Any]:
    weights = {entry: info for entry, info in reader.entries.items() if entry.slot == WEIGHT}
    dtypes: Counter[str] = Counter()
    for info in weights.values():
        dtypes[str(info.dtype).removeprefix("torch.")] += _elements(info)
    slots: Counter[str] = Counter()
    for entry, info in reader.entries.items():
        if entry.slot != WEIGHT:
            slots[entry.slot] += info.nbytes
    return {
        "parameters": sum(_elements(info) for entry, info in weights.items() if not find_tensor(entry.name).row.buffer),
        "tensors": len(weights),
        "dtypes": dict(dtypes),
        "weight_bytes": sum(info.nbytes for info in weights.values()),
        "optimizer_bytes": dict(slots),
        "optimizer_buckets": bool(reader.bucket_keys),
    }


def _controllers(reader: Reader, streams: Any) -> dict[str, Any]:
    controllers = {}
    for entry in reader.entries:
        kind = find_tensor(entry.name).row.controller
        if kind is None or entry.slot != WEIGHT:
            continue
        logits = active(reader.read(entry).float(), streams.num_streams, entry.name)
        values = factors(logits, kind, streams.retention_max_forget)
        controllers[entry.name] = {"kind": kind, "factors": [round(value, 7) for value in values.tolist()]}
    return controllers


def inspect_checkpoint(load: Path, step: int | None = None) -> dict[str, Any]:
    """Return what a checkpoint holds.

    Raises:
        ConversionError: it is not there, its description cannot be read, or its streams are of an unknown format.
    """
    location = locate(load, step, whole=False)
    damage = damage_of(location)
    report: dict[str, Any] = {"folder": str(location.folder), "format": location.format, "complete": damage is None}
    report["bytes_on_disk"] = _folder_bytes(location.folder)
    if damage is not None:
        return {**report, "damage": damage}
    with open_reader(load, step, flaw_in=None) as reader:
        if (flaw := flaw_of(reader)) is not None:
            return {**report, "complete": False, "damage": flaw}
        common = reader.common
        streams = stored_streams(common, location.folder)
        report.update(
            iteration=common.iteration,
            consumed_train_samples=getattr(common.args, "consumed_train_samples", None),
            model="GPT" if hybrid_pattern(common) is None else f"hybrid {hybrid_pattern(common)}",
            layout=asdict(Layout.of(common.args)),
            streams=None if streams is None else asdict(streams),
            controller_names=None if streams is None else ("combined" if common.combined_names else "split"),
            random_states=len(common.rng),
            **_tensors(reader),
            controllers={} if streams is None else _controllers(reader, streams),
        )
    return report


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield a report for people."""
    yield f"{report['folder']} ({report['format']}, {report['bytes_on_disk']:,} bytes)"
    if not report["complete"]:
        yield f"not complete: {report['damage']}"
        return
    layout = Layout(**report["layout"])
    yield f"complete; iteration {report['iteration']}, {report['consumed_train_samples']} samples, saved by {layout}"
    yield f"{report['model']}, {report['parameters']:,} parameters in {report['tensors']} tensors"
    yield "weights: " + ", ".join(f"{count:,} {dtype}" for dtype, count in report["dtypes"].items())
    if report["optimizer_buckets"]:
        yield "optimizer: distributed, in buckets that name no tensors"
    elif report["optimizer_bytes"]:
        yield "optimizer: " + ", ".join(f"{slot} {size:,} bytes" for slot, size in report["optimizer_bytes"].items())
    else:
        yield "optimizer: none"
    if report["streams"] is None:
        yield "an ordinary residual stream"
        return
    streams = report["streams"]
    retention = f"retention up to {streams['retention_max_forget']}" if streams["learned_retention"] else "no retention"
    yield f"{streams['num_streams']} residual streams, {retention}, {report['controller_names']} names"
    for name, controller in report["controllers"].items():
        values = " ".join(f"{value:.5f}" for value in controller["factors"])
        yield f"  {controller['kind']:<9} {name.removesuffix('.logit')}  {values}"
