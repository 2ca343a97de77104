"""Puts this package's writers where upstream's trainer looks for TensorBoard's and wandb's.

    with Replacements() as replaced:
        apply_patches(PATCHES, replaced)
        set_global_variables(args)          # upstream's: now makes our writers, on the last rank
    with closing_writers():
        pretrain(...)

What always holds: a run without --tensorboard-dir and --wandb-project has no writer, as upstream's; with
WANDB_MODE=disabled wandb is not even imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.patches import UpstreamPatch
from megatron.run_control.exit_status import SAVED_ON_REQUEST
from megatron.training.run_logs.wandb_feed import WandbFeed
from megatron.training.run_logs.wandb_session import SessionPlan
from megatron.training.run_logs.warnings_once import forget_warnings

_PLAIN = (bool, int, float, str, type(None))


def run_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of a run as plain data: every argument, and the layout of its streams."""
    from megatron.training.wide_residual_arguments import wide_residual_config_from_args

    config: dict[str, Any] = {}
    for name, value in sorted(vars(args).items()):
        plain = isinstance(value, _PLAIN) or (
            isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value)
        )
        config[name] = value if plain else str(value)
    wide_residual = wide_residual_config_from_args(args)
    if wide_residual is not None:
        dtype = "torch.float32" if args.fp32_residual_connection else str(args.params_dtype)
        carried = wide_residual.num_streams * args.hidden_size
        config["streams"] = {**asdict(wide_residual), "carried_width": carried, "carried_dtype": dtype}
    return config


def _session_plan(args: argparse.Namespace) -> SessionPlan:
    folder = args.wandb_save_dir or (os.path.join(args.save, "wandb") if args.save else ".")
    return SessionPlan(
        project=args.wandb_project,
        folder=folder,
        name=args.wandb_exp_name or None,
        entity=args.wandb_entity or None,
        config=run_config(args),
        timeout=args.wandb_timeout,
    )


def _logs_here(args: argparse.Namespace) -> bool:
    return bool(args.rank == args.world_size - 1)


def _make_set_wandb(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
    del upstream

    def set_wandb_writer(args: argparse.Namespace) -> None:
        import megatron.training.global_vars as global_vars

        if not args.wandb_project or not _logs_here(args) or os.environ.get("WANDB_MODE") == "disabled":
            return
        feed = WandbFeed(
            _session_plan(args),
            Path(args.save) if args.save else None,
            upload_checkpoints=bool(args.wandb_upload_checkpoints),
        )
        global_vars._GLOBAL_WANDB_WRITER = feed
        writer = global_vars.get_tensorboard_writer()
        if writer is not None:
            writer.feed = feed

    return set_wandb_writer


def _make_set_tensorboard(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
    del upstream

    def set_tensorboard_writer(args: argparse.Namespace) -> None:
        import megatron.training.global_vars as global_vars

        forget_warnings()
        if not _logs_here(args) or not (args.tensorboard_dir or args.wandb_project):
            return
        from megatron.training.run_logs.tensorboard_writer import RunWriter

        global_vars._GLOBAL_TENSORBOARD_WRITER = RunWriter(
            args.tensorboard_dir or None, args.tensorboard_queue_size, args.seq_length
        )

    return set_tensorboard_writer


def close_writers(*, failed: bool) -> None:
    """Write out and close what this process has of the two."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    writer, feed = get_tensorboard_writer(), get_wandb_writer()
    if writer is not None:
        writer.close()
    if feed is not None:
        feed.finish(exit_code=int(failed))


@contextmanager
def closing_writers() -> Iterator[None]:
    """Close the writers at the end, and tell wandb whether training failed."""
    failed = True
    try:
        yield
        failed = False
    except SystemExit as leaving:
        failed = leaving.code not in (None, 0, SAVED_ON_REQUEST)
        raise
    finally:
        close_writers(failed=failed)


PATCHES = (
    UpstreamPatch(
        module="megatron.training.global_vars",
        name="_set_tensorboard_writer",
        reason="a disk that fills up ends training, and wandb gets its numbers only beside TensorBoard files",
        source_sha256="9eec040faaed202f00a13eb7bc1f068624e1d183491eb3847f9841effa8c0201",
        make=_make_set_tensorboard,
    ),
    UpstreamPatch(
        module="megatron.training.global_vars",
        name="_set_wandb_writer",
        reason="a server or folder that is not there ends or delays training, and --save is needed for a folder",
        source_sha256="45900feb85c37b6e85f4e11e66cacd1b9ba41dfdd301c42cb9e16cb01abb1aff",
        make=_make_set_wandb,
    ),
)
