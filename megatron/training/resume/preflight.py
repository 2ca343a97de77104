"""Flags of loading and saving, and the check of --load before anything is built.

    add_checkpoint_args(parser)
    check_before_start(args)                     # flags, completeness
    location = checkpoint_to_load(args)          # None: the run starts at step 0, because its command line says so
    check_checkpoint(args, location, stored)     # what depends on restored arguments

A run starts at step 0 without --load; with --load-if-present where nothing is; and where --load and --save name the
same folder and nothing is in it yet, which is how a run that resumes itself is started.

What always holds: nothing that the command line names is silently left unloaded; every process comes to the same
result, because all look at the same files before they meet, and they compare what they found before they load
(strict_load.py).
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from megatron.training.resume.completeness import require_whole
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import TRACKER, CheckpointLocation, find_checkpoint, holds_nothing

_LAYOUT = (
    ("tensor_model_parallel_size", "TP"),
    ("pipeline_model_parallel_size", "PP"),
    ("expert_model_parallel_size", "EP"),
)
_FORMATS = ("torch_dist", "torch")


def _kept_checkpoints(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number; 1 or more is wanted") from None
    if count < 1:
        raise ArgumentTypeError(f"{count} is too few; 1 or more is wanted (leave the flag out to keep all)")
    return count


def add_checkpoint_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to Megatron's parser and return it."""
    group = parser.add_argument_group(title="resuming")
    group.add_argument(
        "--load-if-present",
        action="store_true",
        help="Start at step 0 where --load names a folder without a checkpoint. Without it that is an error, but for a "
        "--load that is --save too.",
    )
    group.add_argument(
        "--load-non-strict",
        action="store_true",
        help="Load what fits of a checkpoint that is not this model's and print what is skipped (with --no-load-optim, "
        "since such an optimizer state fits no other model). Without it any difference is an error.",
    )
    group.add_argument(
        "--keep-last",
        type=_kept_checkpoints,
        default=None,
        metavar="N",
        help="Keep the N latest whole checkpoints of --save and remove older ones, once a newer one is in place "
        "(default: keep all).",
    )
    return parser


def check_checkpoint_flags(args: Namespace) -> None:
    """Raise CheckpointError for flags that cannot be served; the message names them."""
    if args.ckpt_step is not None and args.ckpt_step < 1:
        raise CheckpointError(f"--ckpt-step is {args.ckpt_step}; the number of a saved step, 1 or more, is wanted.")
    if args.ckpt_format not in _FORMATS and (args.load or args.pretrained_checkpoint or args.save):
        raise CheckpointError(
            f"--ckpt-format {args.ckpt_format} cannot be checked on loading: give torch_dist (the default) or torch."
        )
    if args.non_persistent_ckpt_type is not None:
        raise CheckpointError(
            f"--non-persistent-ckpt-type {args.non_persistent_ckpt_type} is not served: its checkpoints are found in "
            "another way. --save-interval and --keep-last 1 keep one checkpoint."
        )
    for flag, given in (("--keep-last", args.keep_last), ("--load-if-present", args.load_if_present)):
        needed = "--save" if flag == "--keep-last" else "--load"
        if given and getattr(args, needed.removeprefix("--")) is None:
            raise CheckpointError(f"{flag} needs {needed} FOLDER.")


def _says_first_start(args: Namespace) -> str | None:
    """Return why a --load where nothing is means step 0 for this command line, or None: it does not say so."""
    if args.exit_on_missing_checkpoint or args.ckpt_step is not None:
        return None
    if args.load_if_present:
        return "--load-if-present"
    if args.save is not None and Path(args.save).resolve() == Path(args.load).resolve():
        return "it is --save too"
    return None


def checkpoint_to_load(args: Namespace) -> CheckpointLocation | None:
    """Return the checkpoint that a run with these arguments loads, or None when it is to start at step 0.

    Raises:
        CheckpointError: there is none where one is asked for, or it cannot be found.
    """
    if args.load is not None and not holds_nothing(args.load):
        if args.pretrained_checkpoint is not None and not (Path(args.load) / TRACKER).is_file():
            raise CheckpointError(
                f"--load {args.load} has steps but no {TRACKER}, so that --pretrained-checkpoint would be taken: leave "
                "one of the two flags out."
            )
        return find_checkpoint(args.load, args.ckpt_step)
    if args.pretrained_checkpoint is not None:
        try:
            return find_checkpoint(args.pretrained_checkpoint, args.ckpt_step)
        except CheckpointError as error:
            raise CheckpointError(f"--pretrained-checkpoint: {error}".replace("--load ", "")) from error
    if args.load is None or _says_first_start(args) is not None:
        return None
    load = Path(args.load)
    found = "it has no checkpoint in it" if load.is_dir() and any(load.iterdir()) else "it is empty"
    raise CheckpointError(
        f"--load {load}: {found if load.is_dir() else 'no such folder'}. Give the folder that training had as --save; "
        "to start at step 0 leave --load out, or add --load-if-present."
    )


def first_start_line(args: Namespace) -> str | None:
    """Return the log line of a run that has nothing to load although --load is there, else None."""
    if args.load is None or args.pretrained_checkpoint is not None or not holds_nothing(args.load):
        return None
    return f"> --load {args.load}: nothing there yet; starting at step 0 ({_says_first_start(args)})"


def check_before_start(args: Namespace) -> None:
    """Raise CheckpointError unless what is to be loaded is there and whole; says so where nothing is to be loaded."""
    check_checkpoint_flags(args)
    location = checkpoint_to_load(args)
    if location is not None:
        require_whole(location)
    elif (line := first_start_line(args)) is not None and args.rank == 0:
        print(line, flush=True)


def check_checkpoint(args: Namespace, location: CheckpointLocation, stored: Namespace | None) -> None:
    """Raise CheckpointError for a checkpoint that this run's format and layout cannot load."""
    if location.format == "torch_dist":
        if args.ckpt_format != "torch_dist" and not args.auto_detect_ckpt_format:
            raise CheckpointError(
                f"{location.folder} has the format torch_dist, --ckpt-format is {args.ckpt_format}: give --ckpt-format "
                "torch_dist, or --auto-detect-ckpt-format."
            )
        return
    if stored is None:
        return
    sizes = {short: (getattr(stored, name, None) or 1, getattr(args, name) or 1) for name, short in _LAYOUT}
    if any(found != wanted for found, wanted in sizes.values()):
        found, wanted = (" ".join(f"{short} {pair[i]}" for short, pair in sizes.items()) for i in (0, 1))
        raise CheckpointError(
            f"{location.folder} was saved with {found} in the plain format (--ckpt-format torch), which loads with the "
            f"same layout alone; this run has {wanted}. Run with that layout, or convert it: python "
            f"tools/checkpoint/convert.py reshard --load {location.load} --save FOLDER --format torch_dist"
        )
