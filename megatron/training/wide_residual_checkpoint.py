"""The stream layout of a checkpoint: stored, restored with --use-checkpoint-args, compared on every load.

Controllers are padded to 128 elements, so a checkpoint of another stream count has the very same shapes and would load
without a word. A checkpoint stores its training arguments; `record_stream_layout` sees to it that they say the whole
layout, values that nobody gave included, and in which version of this format.

    stream count, retention, its bound     differ: refused, with the converter's command line where one helps
    write spread and retention at the start   differ: said; the checkpoint's are kept, they have had their effect
    replay                                 may change at any time, bit for bit the same; said

What always holds: a layout that computes something else than the command line's ends the run before a model is built.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE, WideResidualConfig
from megatron.training.resume.location import CheckpointLocation
from megatron.training.resume.preflight import check_checkpoint, checkpoint_to_load
from megatron.training.resume.stored import stored_arguments
from megatron.training.shortcut_moe_arguments import check_stored_shortcut, restore_shortcut_moe_arguments
from megatron.training.wide_residual_arguments import (
    WIDE_RESIDUAL_ARGUMENTS,
    WIDE_RESIDUAL_SUBFLAGS,
    default_of,
    flag_of,
    wide_residual_config_from_args,
)

FORMAT_ARGUMENT = "wide_residual_format"
FORMAT_VERSION = 1
CONVERTER = "python tools/checkpoint/convert.py"
# What a run's start alone depends on: a loaded controller has left it behind.
_START_ONLY = ("wide_residual_streamwise_sigmoid_init_scale", "wide_residual_retention_init")


def record_stream_layout(args: Namespace) -> None:
    """Write the whole stream layout into validated arguments, which every checkpoint stores."""
    layout = wide_residual_config_from_args(args)
    if layout is None:
        return
    setattr(args, FORMAT_ARGUMENT, FORMAT_VERSION)
    for name, field in WIDE_RESIDUAL_SUBFLAGS.items():
        if layout.learned_retention or "_retention_" not in name:
            setattr(args, name, getattr(layout, field))


def check_format(checkpoint_args: Namespace, load_dir: Path) -> None:
    """Raise ValueError for a stream layout that was stored in another version of this format."""
    version = getattr(checkpoint_args, FORMAT_ARGUMENT, FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the stream layout of the checkpoint in {load_dir} has format {version}; this version reads "
            f"{FORMAT_VERSION}. Load it with the version that wrote it."
        )


def restore_wide_residual_arguments(args: Namespace, checkpoint_args: Namespace) -> None:
    """Set the stream layout of args to the checkpoint's (--use-checkpoint-args).

    Raises:
        ValueError: the command line gives a flag of the layout another value than the checkpoint has.
    """
    wide = getattr(checkpoint_args, "wide_residual", None) is not None
    for name in WIDE_RESIDUAL_ARGUMENTS:
        kept = getattr(checkpoint_args, name, None) if wide else None
        stored, given = kept, getattr(args, name, None)
        if stored is None and wide:
            stored = default_of(name)
        if given is not None and given != stored:
            if name in _START_ONLY and stored is not None:
                continue  # said, and the checkpoint's kept, by check_stream_layout
            raise ValueError(
                f"{flag_of(name)} is {given} on the command line and {stored} in the checkpoint, whose arguments "
                f"--use-checkpoint-args takes; leave {flag_of(name)} out, or --use-checkpoint-args"
            )
        setattr(args, name, kept)


def _describe(layout: WideResidualConfig | None) -> str:
    if layout is None:
        return "an ordinary residual stream"
    retention = (
        f"learned retention (start {layout.retention_init}, max forget {layout.retention_max_forget})"
        if layout.learned_retention
        else "no retention"
    )
    return (
        f"{layout.num_streams} streams, write spread {layout.streamwise_sigmoid_init_scale} at the start, {retention}"
    )


def _remedy(stored: WideResidualConfig | None, wanted: WideResidualConfig | None, load_dir: Path) -> str:
    """Say how to go on, with the converter's command line where it makes the wanted streams of the stored ones."""
    flags = "Give the checkpoint's --wide-residual flags (or --use-checkpoint-args), or another --load"
    have, want = (1 if layout is None else layout.num_streams for layout in (stored, wanted))
    if have == want:
        return f"{flags}."
    start = f"{CONVERTER} {'widen' if stored is None else 'resize'} --load {load_dir}"
    command = f"{start} --save {load_dir}-{want}-streams --num-streams {want}"
    if want == 1:
        return (
            f"{flags}. No ordinary model computes what {have} streams do; more of them: {start} --save FOLDER "
            f"--num-streams {2 * have}"
        )
    if stored is None or want % have == 0:
        return f"{flags}, or convert it: {command}"
    if have % want == 0:
        return f"{flags}, or merge streams, which changes the function: {command} --average"
    return f"{flags}. {have} streams cannot be made {want}: one number has to divide the other."


def _function_of(layout: WideResidualConfig | None) -> Any:
    """Return what a loaded model of this layout computes with."""
    if layout is None:
        return None
    return layout.num_streams, layout.learned_retention and layout.retention_max_forget


def check_stream_layout(args: Namespace, checkpoint_args: Namespace, load_dir: Path) -> list[str]:
    """Compare the checkpoint's stream layout with the one that args ask for; returns the lines to log.

    Values that act at the start alone are set to the checkpoint's in args.

    Raises:
        ValueError: the checkpoint was written by a model that computes with other streams.
    """
    check_format(checkpoint_args, load_dir)
    stored = None
    if getattr(checkpoint_args, "wide_residual", None) is not None:
        stored = wide_residual_config_from_args(checkpoint_args)
    wanted = wide_residual_config_from_args(args)
    if _function_of(stored) != _function_of(wanted):
        raise ValueError(
            f"the checkpoint in {load_dir} has {_describe(stored)}; this run asks for {_describe(wanted)}. "
            f"{_remedy(stored, wanted, load_dir)}"
        )
    if stored is None or wanted is None:
        return []
    lines = []
    for name in _START_ONLY:
        field = WIDE_RESIDUAL_SUBFLAGS[name]
        have, want = getattr(stored, field), getattr(wanted, field)
        if have != want and (stored.learned_retention or "_retention_" not in name):
            lines.append(f"> {flag_of(name)} {want} has no effect: the model of {load_dir} started with {have}")
            setattr(args, name, have)
    was, now = _replay(checkpoint_args), _replay(args)
    if was != now:
        lines.append(
            f"> replay of residual streams: {now}; {was} when {load_dir} was written (same results, bit for bit)"
        )
    return lines


def _replay(args: Namespace) -> str:
    if RESIDUAL_STREAM_MODULE not in (getattr(args, "recompute_modules", None) or ()):
        return "off"
    return f"blocks of {getattr(args, 'residual_stream_recompute_num_layers', None) or 'all'} layers"


def restore_and_check_stream_layout(args: Namespace) -> None:
    """Restore the layout where asked, and compare it with that of the checkpoint that the run will load."""
    location = checkpoint_to_load(args)
    if location is None:
        return
    checkpoint_args = stored_arguments(location)
    check_checkpoint(args, location, checkpoint_args)
    if checkpoint_args is None:
        _require_ordinary(args, location)
        return
    if args.use_checkpoint_args:
        restore_wide_residual_arguments(args, checkpoint_args)
        restore_shortcut_moe_arguments(args, checkpoint_args)
    for line in check_stream_layout(args, checkpoint_args, location.load):
        if args.rank == 0:
            print(line, flush=True)
    check_stored_shortcut(args, checkpoint_args, str(location.load))


def _require_ordinary(args: Namespace, location: CheckpointLocation) -> None:
    """Raise ValueError for a wide run: its layout is unknown without stored arguments; an ordinary one has its keys."""
    if args.wide_residual is not None:
        raise ValueError(
            f"the checkpoint in {location.load} stores no training arguments, so its stream layout cannot be compared "
            "with --wide-residual. Load a checkpoint that was saved by pretrain_gpt.py or pretrain_mamba.py."
        )
