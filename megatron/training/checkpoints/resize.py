"""K streams -> K' streams.

    plan_resize(reader, 8)                    # K=4: every stream twice, the same function
    plan_resize(reader, 2, average=True)      # neighbouring streams merged, lossy: the plan says by how much

Copies of a stream have equal gradients and stay equal for ever, unless `spread` sets their write factors apart (their
mean kept, so the function is still the same).

What always holds: only controllers change; optimizer states of duplicated streams are scaled as their gradients are,
those of merged streams begin at zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Entry, TensorInfo
from megatron.training.checkpoints.companions import MASTER_SLOTS
from megatron.training.checkpoints.controllers import average, duplicate, moment_scale, spread_within
from megatron.training.checkpoints.conversion import Plan, Step, copy_step, ordered, refuse_buckets, weights_only
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import MIN_CONTROLLER
from megatron.training.checkpoints.open_checkpoint import Reader
from megatron.training.checkpoints.tensor_table import find_tensor
from megatron.training.checkpoints.widen import set_streams, stored_streams, style_of


def _check(old: int, new: int, merge: bool) -> None:
    if new < 2:
        raise ConversionError(f"--num-streams {new}: 2 or more are wanted")
    if new == old:
        raise ConversionError(f"the checkpoint has {old} streams already")
    if new % old == 0 and not merge:
        return
    if old % new == 0 and merge:
        return
    if new % old == 0:
        raise ConversionError(f"--average merges streams, and {new} are more than {old}: leave it out")
    if old % new == 0:
        raise ConversionError(
            f"{old} streams become {new} only by merging, which changes the function: give --average to accept that"
        )
    raise ConversionError(
        f"{old} streams cannot become {new}: every stream has to be duplicated equally often ({new} is no multiple of "
        f"{old}), or with --average merged in groups of one size ({old} is no multiple of {new})"
    )


def plan_resize(
    reader: Reader, num_streams: int, *, merge: bool = False, spread: float = 0.0, keep_optimizer: bool = True
) -> Plan:
    """Return the plan that changes the number of streams.

    Args:
        merge: average groups of streams (num_streams divides the old number); lossy.
        spread: of the write factors of a stream's copies, 0 <= spread < 1.

    Raises:
        ConversionError: an ordinary checkpoint, a number that cannot be reached, a spread out of range.
    """
    config = stored_streams(reader.common, reader.folder)
    if config is None:
        raise ConversionError(f"{reader.folder} has an ordinary residual stream: `convert.py widen` gives it streams")
    old = config.num_streams
    _check(old, num_streams, merge)
    if not 0 <= spread < 1 or (merge and spread):
        raise ConversionError(f"--spread {spread}: from 0 to below 1 is wanted, and none with --average")
    if keep_optimizer:
        refuse_buckets(reader, "resize")
    common = reader.common.copied()
    set_streams(common, replace(config, num_streams=num_streams))
    steps = []
    for entry, info in reader.entries.items():
        kind = find_tensor(entry.name).row.controller
        if kind is None:
            steps.append(copy_step(entry, info))
            continue
        shape = (max(num_streams, MIN_CONTROLLER),)
        make = (
            _merged(entry, kind, old, num_streams)
            if merge
            else _duplicated(reader, entry, kind, old, num_streams, spread)
        )
        steps.append(Step(entry, TensorInfo(shape, info.dtype), entry, make, "compute"))
    plan = Plan(
        f"resize: {reader.folder} from {old} to {num_streams} streams",
        ordered(steps),
        common,
        Layout.of(common.args),
        reader.format,
        style_of(reader),
        notes=_notes(reader, old, num_streams, merge, spread, config.retention_max_forget),
        inexact="merged streams differed" if merge else None,
    )
    if not keep_optimizer:
        weights_only(reader, plan)
    return plan


def _value(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _duplicated(
    reader: Reader, entry: Entry, kind: str, old: int, new: int, spread: float
) -> Callable[[Tensor | None], Tensor]:
    copies = new // old

    def logits(stored: Tensor | None) -> Tensor:
        return duplicate(_value(stored).float(), kind, old, copies, str(entry), spread)

    def moment(stored: Tensor | None) -> Tensor:
        scale = moment_scale(reader.read(Entry(entry.name)).float(), kind, old, copies, str(entry))
        power = 2 if entry.slot == "exp_avg_sq" else 1
        values = torch.zeros_like(scale)
        values[:new] = _value(stored)[:old].float().repeat_interleave(copies)
        return (values.double() * scale.double() ** power).to(_value(stored).dtype)

    return logits if entry.slot == WEIGHT or entry.slot in MASTER_SLOTS else moment


def _merged(entry: Entry, kind: str, old: int, new: int) -> Callable[[Tensor | None], Tensor]:
    def logits(stored: Tensor | None) -> Tensor:
        return average(_value(stored).float(), kind, old, old // new, str(entry))

    def afresh(stored: Tensor | None) -> Tensor:
        return torch.zeros(max(new, MIN_CONTROLLER), dtype=_value(stored).dtype)

    return logits if entry.slot == WEIGHT or entry.slot in MASTER_SLOTS else afresh


def _notes(reader: Reader, old: int, new: int, merge: bool, spread: float, max_forget: float) -> list[str]:
    if not merge:
        if spread:
            return [f"write factors of a stream's copies differ by up to {spread:g} of it; the function is the same"]
        return ["copies of a stream stay equal for ever, for their gradients are equal: --spread 0.01 lets them differ"]
    largest: dict[str, float] = {}
    for entry in reader.entries:
        kind = find_tensor(entry.name).row.controller
        if kind is not None and entry.slot == WEIGHT:
            value = spread_within(reader.read(entry).float(), kind, old, old // new, entry.name, max_forget)
            largest[kind] = max(largest.get(kind, 0.0), value)
    differences = ", ".join(f"{kind} {value:.3g}" for kind, value in sorted(largest.items()))
    return [
        "merging is lossy: the function changes as far as merged streams differ; --verify measures the logits",
        f"largest distance of a merged factor from its group's mean: {differences}",
    ]
