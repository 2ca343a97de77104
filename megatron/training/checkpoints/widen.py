"""Ordinary checkpoint -> K streams: the same function (but for learned retention), ready to train on.

    plan = plan_widen(reader, WideResidualConfig(num_streams=4))
    execute(plan, reader, Path("runs/wide/checkpoints"))

Base weights are untouched; controllers are those of a new wide model, so that the wide model computes the ordinary one.
Learned retention is the exception: it starts below 1 (retention_init, 0.999), so every write forgets a little of each
stream and the logits move; no start of 1 exists, its logit would be infinite. The plan says so.

Optimizer states of base weights are kept, those of controllers begin at zero.

What always holds: the stored arguments describe the wide model; iteration, samples, scheduler and random numbers stay.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo
from megatron.training.checkpoints.companions import MASTER_SLOTS
from megatron.training.checkpoints.controllers import controller_names, fresh_controller
from megatron.training.checkpoints.conversion import Plan, Step, copy_step, ordered, refuse_buckets, weights_only
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import Reader, require_known_format
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.sharded_style import ShardedStyle
from megatron.training.wide_residual_arguments import WIDE_RESIDUAL_SUBFLAGS, wide_residual_config_from_args
from megatron.training.wide_residual_checkpoint import record_stream_layout


def stored_streams(common: Common, folder: Path) -> WideResidualConfig | None:
    """Return the stream layout that the arguments of the checkpoint in `folder` tell.

    Raises:
        ConversionError: they tell an impossible one, or one of a format that is not known here.
    """
    require_known_format(common, folder)
    try:
        return wide_residual_config_from_args(common.args)
    except (TypeError, ValueError) as error:
        raise ConversionError(f"the stored arguments describe no valid streams: {error}") from error


def set_streams(common: Common, config: WideResidualConfig) -> None:
    """Write a stream layout into stored arguments, as a run with its flags does."""
    common.args.wide_residual = config.num_streams
    for name, field in WIDE_RESIDUAL_SUBFLAGS.items():
        kept = config.learned_retention or name == "wide_residual_streamwise_sigmoid_init_scale"
        setattr(common.args, name, getattr(config, field) if kept else None)
    record_stream_layout(common.args)


def retention_note(config: WideResidualConfig) -> str | None:
    """Return why a newly widened model computes something else than the ordinary one; None when it does not."""
    if not config.learned_retention:
        return None
    return f"learned retention starts at {config.retention_init:g}, so every write forgets a little of each stream"


def style_of(reader: Reader) -> ShardedStyle | None:
    """Return how a torch_dist source spells its keys."""
    return ShardedStyle.of_reader(reader) if isinstance(reader, ShardedReader) else None


def plan_widen(reader: Reader, config: WideResidualConfig, *, keep_optimizer: bool = True) -> Plan:
    """Return the plan that gives an ordinary model streams.

    Raises:
        ConversionError: the model has streams already, or its optimizer state cannot be taken apart.
    """
    before = stored_streams(reader.common, reader.folder)
    if before is not None:
        raise ConversionError(
            f"{reader.folder} has {before.num_streams} streams already: `convert.py resize` gives it another number"
        )
    if keep_optimizer:
        refuse_buckets(reader, "widen")
    common = reader.common.copied()
    set_streams(common, config)
    steps = [copy_step(entry, info) for entry, info in reader.entries.items()]
    slots = {entry.slot: info.dtype for entry, info in reader.entries.items()}
    shape = tuple(fresh_controller("decoder.residual_stream_readout.exit_map.logit", config).shape)
    weights = [entry.name for entry in reader.entries if entry.slot == WEIGHT]
    for name in controller_names(weights, config, common.args):
        for slot, dtype in slots.items():
            itself = slot == WEIGHT or slot in MASTER_SLOTS
            steps.append(_create(name, slot, config, TensorInfo(shape, torch.float32 if itself else dtype)))
    inexact = retention_note(config)
    notes = [] if inexact is None else [f"not exactly the same function: {inexact}; --verify measures it"]
    if set(slots) != {WEIGHT} and keep_optimizer:
        notes.append("optimizer states of base weights are kept; those of controllers begin at zero")
    plan = Plan(
        f"widen: {reader.folder} to {config.num_streams} streams",
        ordered(steps),
        common,
        Layout.of(common.args),
        reader.format,
        style_of(reader),
        notes=notes,
        inexact=inexact,
    )
    if not keep_optimizer:
        weights_only(reader, plan)
    return plan


def _create(name: str, slot: str, config: WideResidualConfig, info: TensorInfo) -> Step:
    if slot == WEIGHT or slot in MASTER_SLOTS:
        return Step(Entry(name, slot), info, None, lambda _: fresh_controller(name, config), "create")
    return Step(Entry(name, slot), info, None, lambda _: torch.zeros(info.shape, dtype=info.dtype), "create")
