"""Command-line flags of shortcut MoE (arXiv 2404.05019), their checks and their way into a model's stack spec.

    parse_and_validate_args(extra_args_provider=add_shortcut_moe_args)
    check_shortcut_moe_arguments(args)                       # flags, options and pattern, before a model is built
    spec = shortcut_stack_spec(args, hybrid_stack_spec)      # with --moe-shortcut-connection

A checkpoint stores the flags with its training arguments. What always holds: a checkpoint with another setting of
--moe-shortcut-connection, an MoE layer that cannot be paired, or an option that cannot be served ends the run before a
model is built.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from megatron.core.models.hybrid.shortcut_pairs import MOE_SYMBOL, UnpairedLayerError, shortcut_pairs
from megatron.core.transformer.moe.shortcut_moe_options import PARALLEL_FLAG, SHORTCUT_FLAG, check_shortcut_options
from megatron.training.hybrid_patterns import DEPTH, pipeline_segments, pointed_error

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def add_shortcut_moe_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to Megatron's parser and return it."""
    group = parser.add_argument_group(title="shortcut MoE")
    group.add_argument(
        SHORTCUT_FLAG,
        action="store_true",
        help="Pair every MoE layer (E) of a hybrid pattern with the attention, Mamba or MLP layer directly before it: "
        "the routed experts read the stream before that layer, the shared expert after it, and the sum of both is "
        "normed (arXiv 2404.05019). Needs --moe-shared-expert-intermediate-size.",
    )
    group.add_argument(
        PARALLEL_FLAG,
        action="store_true",
        help=f"With {SHORTCUT_FLAG}: run the routed experts on a CUDA stream of their own, beside the layer before "
        "them. The numbers are the same; on a CPU nothing changes. With Transformer Engine it needs --moe-router-dtype "
        "fp64.",
    )
    return parser


def restore_shortcut_moe_arguments(args: Namespace, checkpoint_args: Namespace) -> None:
    """Set the flags of args to the checkpoint's (--use-checkpoint-args).

    Raises:
        ValueError: --moe-shortcut-connection is given, and the checkpoint was written without it.
    """
    if args.moe_shortcut_connection and not getattr(checkpoint_args, "moe_shortcut_connection", False):
        raise ValueError(
            f"{SHORTCUT_FLAG} is given, and the checkpoint, whose arguments --use-checkpoint-args takes, was written "
            f"without it; leave {SHORTCUT_FLAG} out, or --use-checkpoint-args"
        )
    for name in ("moe_shortcut_connection", "moe_shortcut_parallel"):
        setattr(args, name, getattr(args, name) or bool(getattr(checkpoint_args, name, False)))


def check_stored_shortcut(args: Namespace, checkpoint_args: Namespace, load_dir: str) -> None:
    """Raise ValueError unless the checkpoint was written with the same setting of --moe-shortcut-connection."""
    stored = bool(getattr(checkpoint_args, "moe_shortcut_connection", False))
    if stored != args.moe_shortcut_connection:
        found, remedy = ("with", "add it") if stored else ("without", "leave it out")
        raise ValueError(
            f"the checkpoint in {load_dir} was written {found} {SHORTCUT_FLAG}; {remedy} (or give "
            "--use-checkpoint-args), or give another --load"
        )


def check_shortcut_pattern(pattern: str, args: Namespace) -> None:
    """Raise ValueError, pointing at the position, for an MoE layer that has no layer ahead to pair with."""
    main = pattern.split(DEPTH)[0]
    if MOE_SYMBOL not in main:
        raise ValueError(f"{SHORTCUT_FLAG} pairs MoE layers (E) with the layers before them; '{main}' has no E")
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    for start, segment in pipeline_segments(pattern, args.pipeline_model_parallel_size, first, last):
        try:
            shortcut_pairs(segment)
        except UnpairedLayerError as unpaired:
            position = start + unpaired.index
            raise pointed_error(
                f"'E' at position {position + 1} of the pattern {unpaired}", pattern, position
            ) from None


def check_shortcut_moe_arguments(args: Namespace) -> None:
    """Raise ValueError for flags of shortcut MoE that cannot be served; the message names the flag and the reason."""
    if not args.moe_shortcut_connection:
        if args.moe_shortcut_parallel:
            raise ValueError(f"{PARALLEL_FLAG} given without {SHORTCUT_FLAG}; add it, or leave {PARALLEL_FLAG} out")
        return
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    if pattern is None:
        raise ValueError(
            f"{SHORTCUT_FLAG} pairs the layers of a hybrid pattern, and a GPT has none: each of its layers holds "
            'attention and MoE as one. Give pretrain_mamba.py --hybrid-layer-pattern "*E*E", or leave it out.'
        )
    check_shortcut_options(args, parallel=args.moe_shortcut_parallel)
    check_shortcut_pattern(pattern, args)


def shortcut_stack_spec(args: Namespace, spec: ModuleSpec) -> ModuleSpec:
    """Return the spec, ordinary or wide, of the stack that pairs MoE layers as args ask for it.

    Prints one line on rank 0 where --moe-shortcut-parallel has no effect.

    Raises:
        ValueError: arguments that cannot be served.
        TypeError: a spec without a shortcut twin.
    """
    import torch

    from megatron.core.models.hybrid.shortcut_hybrid_stack import shortcut_hybrid_stack_spec

    check_shortcut_moe_arguments(args)
    if args.moe_shortcut_parallel and not torch.cuda.is_available() and args.rank == 0:
        print(f"> {PARALLEL_FLAG}: a CPU has no CUDA streams; one after the other, with the same numbers", flush=True)
    return shortcut_hybrid_stack_spec(spec, parallel=args.moe_shortcut_parallel)
