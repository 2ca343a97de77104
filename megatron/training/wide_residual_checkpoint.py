"""The stream layout of a checkpoint: restored with --use-checkpoint-args, compared on every load.

Controllers are padded to 128 elements, so a checkpoint of another stream count has the very same shapes and would load
without a word. A checkpoint stores its training arguments; this module reads the layout from them.

What always holds: a layout that differs from the command line's ends the run before a model is built.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.training.checkpointing import _load_base_checkpoint, checkpoint_exists

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.shortcut_moe_arguments import check_stored_shortcut, restore_shortcut_moe_arguments
from megatron.training.wide_residual_arguments import (
    WIDE_RESIDUAL_ARGUMENTS,
    default_of,
    flag_of,
    wide_residual_config_from_args,
)


def read_checkpoint_arguments(load_dir: str | None, args: Namespace) -> Namespace | None:
    """Return the training arguments stored in the checkpoint that load_dir's tracker names; None without one."""
    if load_dir is None or not checkpoint_exists(load_dir):
        return None
    state_dict, *_ = _load_base_checkpoint(load_dir, args, rank0=True)
    if state_dict is None:
        return None
    if state_dict.get("args") is None and args.wide_residual is not None:
        raise ValueError(
            f"the checkpoint in {load_dir} stores no training arguments, so its stream layout cannot be compared with "
            "--wide-residual. Load a checkpoint that was saved by pretrain_gpt.py."
        )
    return state_dict.get("args")


def restore_wide_residual_arguments(args: Namespace, checkpoint_args: Namespace) -> None:
    """Set the stream layout of args to the checkpoint's (--use-checkpoint-args).

    Raises:
        ValueError: the command line gives a flag of the layout another value than the checkpoint has.
    """
    for name in WIDE_RESIDUAL_ARGUMENTS:
        stored, given = getattr(checkpoint_args, name, None), getattr(args, name, None)
        if stored is None and getattr(checkpoint_args, "wide_residual", None) is not None:
            stored = default_of(name)
        if given is not None and given != stored:
            raise ValueError(
                f"{flag_of(name)} is {given} on the command line and {stored} in the checkpoint, whose arguments "
                f"--use-checkpoint-args takes; leave {flag_of(name)} out, or --use-checkpoint-args"
            )
        setattr(args, name, getattr(checkpoint_args, name, None))


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


def check_stream_layout(args: Namespace, checkpoint_args: Namespace, load_dir: str) -> None:
    """Raise ValueError unless the checkpoint was written by a model with the stream layout that args ask for."""
    stored = wide_residual_config_from_args(checkpoint_args)
    wanted = wide_residual_config_from_args(args)
    if stored != wanted:
        raise ValueError(
            f"the checkpoint in {load_dir} has {_describe(stored)}; this run asks for {_describe(wanted)}. Give the "
            "checkpoint's --wide-residual flags (or --use-checkpoint-args), or another --load."
        )


def restore_and_check_stream_layout(args: Namespace) -> None:
    """Restore the layout where asked, and compare it for each checkpoint that the run would load."""
    for load_dir in (args.pretrained_checkpoint, args.load):
        checkpoint_args = read_checkpoint_arguments(load_dir, args)
        if checkpoint_args is None:
            continue
        if args.use_checkpoint_args:
            restore_wide_residual_arguments(args, checkpoint_args)
            restore_shortcut_moe_arguments(args, checkpoint_args)
        check_stream_layout(args, checkpoint_args, load_dir)
        check_stored_shortcut(args, checkpoint_args, load_dir)
