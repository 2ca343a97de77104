"""Command-line flags of what a run reports about itself: its Weights & Biases run and the health of its streams.

    ArgumentExtension(add_run_log_args, before_validation=check_run_log_arguments, after_validation=complete_...)

Upstream's flags (`--wandb-project`, `--wandb-exp-name`, `--wandb-save-dir`, `--wandb-entity`, `--tensorboard-dir`,
`--log-interval`) keep their meaning. What wandb reads from its own environment variables (WANDB_MODE, WANDB_RUN_GROUP,
WANDB_TAGS, WANDB_JOB_TYPE, WANDB_RUN_ID, WANDB_NOTES, ...) holds where the flag is not given.

What always holds: a flag that has nothing to act on is an error.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from megatron.run_control.wandb_identity import RUN_ID, RUN_ID_WANTED

DEFAULT_STREAMS_INTERVAL = 100
DEFAULT_WANDB_TIMEOUT = 30.0

# Attributes of the namespace that say something to wandb and nothing without a project.
_WANDB_ARGUMENTS = ("wandb_run_id", "wandb_group", "wandb_tags", "wandb_job_type", "wandb_upload_checkpoints")


def _interval(text: str) -> int:
    try:
        interval = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number; steps, or 0 for off, are wanted") from None
    if interval < 0:
        raise ArgumentTypeError(f"{interval} is negative; steps, or 0 for off, are wanted")
    return interval


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no time; seconds above 0 are wanted")
    return seconds


def _run_id(text: str) -> str:
    if not RUN_ID.fullmatch(text):
        raise ArgumentTypeError(f"{text!r} is no run id of wandb: {RUN_ID_WANTED}")
    return text


def add_run_log_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to Megatron's parser and return it."""
    group = parser.add_argument_group(title="run logs")
    group.add_argument(
        "--wandb-run-id",
        type=_run_id,
        default=None,
        metavar="ID",
        help="Id of the wandb run (default: WANDB_RUN_ID, else the one that the --save folder keeps, else a new one).",
    )
    group.add_argument(
        "--wandb-group", default=None, metavar="NAME", help="Group of the wandb run (default: WANDB_RUN_GROUP)."
    )
    group.add_argument(
        "--wandb-tags",
        nargs="+",
        default=None,
        metavar="TAG",
        help="Tags of the wandb run, separated by spaces or commas (default: WANDB_TAGS).",
    )
    group.add_argument(
        "--wandb-job-type", default=None, metavar="TYPE", help="Job type of the wandb run (default: WANDB_JOB_TYPE)."
    )
    group.add_argument(
        "--wandb-upload-checkpoints",
        action="store_true",
        default=None,
        help="Upload every saved checkpoint as a wandb artifact (default: only its path and step are noted).",
    )
    group.add_argument(
        "--wandb-timeout",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="Longest time that the end of training waits for wandb, and longest time to look for its server, after "
        f"which the run is kept on disk only (default: {DEFAULT_WANDB_TIMEOUT:.0f}).",
    )
    group.add_argument(
        "--log-streams-interval",
        type=_interval,
        default=None,
        metavar="N",
        help="Report the health of wide residual streams every N steps; 0 switches it off (default: "
        f"{DEFAULT_STREAMS_INTERVAL} with --wide-residual).",
    )
    return parser


def check_run_log_arguments(args: Namespace) -> None:
    """Raise ValueError for a flag that has nothing to act on; the message names the flag."""
    given = [name for name in (*_WANDB_ARGUMENTS, "wandb_timeout") if getattr(args, name) is not None]
    if given and not args.wandb_project:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} given without --wandb-project; add it, or leave {flags} out")
    if args.log_streams_interval and args.wide_residual is None:
        raise ValueError(
            f"--log-streams-interval {args.log_streams_interval} needs wide residual streams (--wide-residual K); an "
            "ordinary model has one stream"
        )


def complete_run_log_arguments(args: Namespace) -> None:
    """Put the defaults in the place of what was not given, and tags separated by commas apart."""
    if args.log_streams_interval is None:
        args.log_streams_interval = DEFAULT_STREAMS_INTERVAL if args.wide_residual is not None else 0
    if args.wandb_project:
        # What wandb is asked for shows a run's speed and memory too; upstream's flags for them are off by default.
        args.log_throughput = args.log_timers_to_tensorboard = args.log_memory_to_tensorboard = True
    if args.wandb_timeout is None:
        args.wandb_timeout = DEFAULT_WANDB_TIMEOUT
    if args.wandb_tags is not None:
        args.wandb_tags = [tag for text in args.wandb_tags for tag in text.split(",") if tag]
