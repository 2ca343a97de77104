"""Command-line flags of wide residual streams, their check and their way into a WideResidualConfig.

    parse_and_validate_args(extra_args_provider=add_wide_residual_args)
    wide_residual = wide_residual_config_from_args(args)      # None without --wide-residual

What always holds: a sub-flag without --wide-residual is an error; flags that were not given stay None in the
namespace, so that a checkpoint's values can be told from the command line's.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import fields
from typing import Any

from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE, WideResidualConfig

# Sub-flags: attribute of the namespace -> field of WideResidualConfig.
WIDE_RESIDUAL_SUBFLAGS = {
    "wide_residual_streamwise_sigmoid_init_scale": "streamwise_sigmoid_init_scale",
    "wide_residual_learned_retention": "learned_retention",
    "wide_residual_retention_init": "retention_init",
    "wide_residual_retention_max_forget": "retention_max_forget",
}

# What a checkpoint stores of the stream layout and --use-checkpoint-args restores.
WIDE_RESIDUAL_ARGUMENTS = ("wide_residual", *WIDE_RESIDUAL_SUBFLAGS)

AUTO = "auto"

_DEFAULTS = {field.name: field.default for field in fields(WideResidualConfig)}


def _stream_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no whole number; 2 or more streams are wanted") from None
    if count < 2:
        raise ArgumentTypeError(f"{count} is too few; 2 or more streams are wanted (leave the flag out for one)")
    return count


def _block_size(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    try:
        size = int(text)
    except ValueError:
        raise ArgumentTypeError(f'{text!r} is no whole number; 1 or more layers, or "{AUTO}", are wanted') from None
    if size < 1:
        raise ArgumentTypeError(f'{size} is too few; 1 or more layers, or "{AUTO}", are wanted')
    return size


def add_wide_residual_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to Megatron's parser and return it."""
    group = parser.add_argument_group(title="wide residual streams")
    group.add_argument(
        "--wide-residual",
        type=_stream_count,
        default=None,
        metavar="K",
        help="Carry K residual streams of width hidden-size between layers (2 or more). Attention and MLP still "
        "compute at hidden-size. Without this flag the model is the ordinary one.",
    )
    group.add_argument(
        "--wide-residual-streamwise-sigmoid-init-scale",
        type=float,
        default=None,
        metavar="SCALE",
        help="Spread of the write logits over the streams at the start, linspace(-SCALE, +SCALE, K); it is what makes "
        f"the streams differ (default: {_DEFAULTS['streamwise_sigmoid_init_scale']}).",
    )
    group.add_argument(
        "--wide-residual-learned-retention",
        action="store_true",
        default=None,
        help="Let each write forget a learned, bounded share of each stream (default: off, streams are kept whole).",
    )
    group.add_argument(
        "--wide-residual-retention-init",
        type=float,
        default=None,
        metavar="G",
        help=f"Share of a stream that a write keeps at the start (default: {_DEFAULTS['retention_init']}).",
    )
    group.add_argument(
        "--wide-residual-retention-max-forget",
        type=float,
        default=None,
        metavar="F",
        help="Largest share of a stream that a write can ever forget "
        f"(default: {_DEFAULTS['retention_max_forget']:.2f}).",
    )
    group.add_argument(
        "--residual-stream-recompute-num-layers",
        type=_block_size,
        default=None,
        metavar="N",
        help="With --recompute-granularity selective --recompute-modules residual_stream: layers in a replay block, "
        'whose reads, norms and writes are rebuilt together in the backward; "auto" takes the N of the least memory '
        "(default: all layers of a pipeline stage as one block).",
    )
    return parser


def flag_of(attribute: str) -> str:
    """Return the command-line flag of an attribute of the namespace."""
    return "--" + attribute.replace("_", "-")


def default_of(attribute: str) -> Any:
    """Return what an argument that was not given stands for (None for --wide-residual itself)."""
    return _DEFAULTS.get(WIDE_RESIDUAL_SUBFLAGS.get(attribute, ""))


def check_replay_arguments(args: Namespace) -> None:
    """Raise ValueError for replay flags that have nothing to act on; the message names the flag."""
    replays = RESIDUAL_STREAM_MODULE in (args.recompute_modules or ())
    size = args.residual_stream_recompute_num_layers
    if size is not None and not replays:
        raise ValueError(
            f"--residual-stream-recompute-num-layers {size} given without residual_stream among --recompute-modules; "
            "add --recompute-granularity selective --recompute-modules residual_stream, or leave it out"
        )
    if replays and args.wide_residual is None:
        raise ValueError("--recompute-modules residual_stream needs wide residual streams (--wide-residual K)")
    if replays and args.recompute_granularity != "selective":
        raise ValueError(
            "--recompute-modules residual_stream needs --recompute-granularity selective; it is "
            f"{args.recompute_granularity or 'not given'}"
        )


def check_stream_dtype(args: Namespace) -> None:
    """Raise ValueError for an ordinary fp32 stream beside half-precision weights where no norm can take both: that of
    an ordinary model, or that of prediction depths, which are ordinary beside wide streams too."""
    half = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if not (args.fp32_residual_connection and half and args.transformer_impl == "local"):
        return
    if args.mtp_num_layers or "/" in (args.hybrid_layer_pattern or args.hybrid_override_pattern or ""):
        raise ValueError(
            f"--fp32-residual-connection with --{half} and multi-token prediction needs transformer-engine: torch's "
            f"norms take no fp32 stream beside {half} weights, and prediction depths have one. Leave one of them out."
        )
    if args.wide_residual is None:
        raise ValueError(
            f"--fp32-residual-connection with --{half} needs transformer-engine: torch's norms take no fp32 stream "
            f"beside {half} weights. Leave it out, or give --wide-residual K, whose branches are read in {half}."
        )


def check_stream_backend(args: Namespace) -> None:
    """Raise ValueError for wide streams that the chosen MEGATRON_STREAMWISE_BACKEND cannot run on this host."""
    if args.wide_residual is None:
        return
    import torch

    from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE, streamwise_operators

    operators = streamwise_operators(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    most = operators.max_streams
    if most is not None and args.wide_residual > most:
        raise ValueError(
            f"--wide-residual {args.wide_residual}: the {operators.name} kernels of the streams serve {most} at most. "
            f"Give fewer streams, or set {BACKEND_VARIABLE}=eager, which is slower."
        )


def wide_residual_config_from_args(args: Namespace) -> WideResidualConfig | None:
    """Return the stream layout that the arguments ask for, or None for the ordinary model.

    Raises:
        ValueError: a sub-flag without --wide-residual, a retention bound without learned retention, a value out of
            range; the message names the flag.
    """
    given = {name: getattr(args, name, None) for name in WIDE_RESIDUAL_SUBFLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    if getattr(args, "wide_residual", None) is None:
        if given:
            raise ValueError(
                f"{', '.join(map(flag_of, given))} given without --wide-residual; add --wide-residual K, or leave "
                f"{'it' if len(given) == 1 else 'them'} out"
            )
        return None
    if not given.get("wide_residual_learned_retention"):
        bounds = [name for name in given if "retention_init" in name or "max_forget" in name]
        if bounds:
            raise ValueError(
                f"{', '.join(map(flag_of, bounds))} given without --wide-residual-learned-retention; add it, or leave "
                f"{'it' if len(bounds) == 1 else 'them'} out"
            )
    options: dict[str, Any] = {WIDE_RESIDUAL_SUBFLAGS[name]: value for name, value in given.items()}
    try:
        return WideResidualConfig(num_streams=args.wide_residual, **options)
    except ValueError as error:
        message = str(error)
        for attribute, field in WIDE_RESIDUAL_SUBFLAGS.items():
            message = re.sub(rf"\b{field}\b", flag_of(attribute), message)
        raise ValueError(message) from error
