"""The arguments of a hybrid model, checked together before upstream validates them.

    check_hybrid_arguments(args)      # pretrain_mamba.py
    refuse_hybrid_arguments(args)     # the scripts of other models

Upstream ignores, or meets with an assertion while it builds the model, what does not fit the pattern: a number of
prediction depths or of experts that it does not have, Mamba heads that cannot be divided. Here each is one sentence.

What always holds: an option that the user gave is in the model, or the run ends with the reason.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.training.hybrid_patterns import (
    DEPTH,
    PIPE,
    check_hybrid_pattern,
    check_layer_count,
    check_pipeline_segments,
    check_uneven_stages,
    known_symbols,
    pointed_error,
)

_NAMES = {"--hybrid-layer-pattern": "hybrid_layer_pattern", "--hybrid-override-pattern": "hybrid_override_pattern"}
_EXPANSION = 2  # inner features of a Mamba-2 layer over hidden features: MambaMixer's `expand`


def given_pattern(args: Namespace) -> tuple[str, str] | None:
    """Return (the option's name, the pattern), or None without one.

    Raises:
        ValueError: both names of the option.
    """
    given = {flag: getattr(args, name) for flag, name in _NAMES.items() if getattr(args, name, None) is not None}
    if len(given) == 2:
        ours, older = given.values()
        if not args.use_checkpoint_args:
            raise ValueError(
                "--hybrid-layer-pattern and --hybrid-override-pattern are two names of one option, the second is the "
                "older; give one of them"
            )
        if ours != older:
            raise ValueError(
                f"--hybrid-override-pattern is {older}, the pattern that --use-checkpoint-args takes from the "
                f"checkpoint is {ours}; to cut it into other pipeline segments give --hybrid-layer-pattern instead"
            )
    return next(iter(given.items()), None)


def check_hybrid_arguments(args: Namespace) -> None:
    """Check the pattern of the parsed arguments, and what depends on it, before upstream validates them.

    The older name is cleared where a checkpoint gave the same pattern under the newer one.

    Raises:
        ValueError: no pattern, two patterns, one that cannot be built here, or an option that does not fit it; a
            mistake in the pattern is pointed at.
    """
    found = given_pattern(args)
    if found is None:
        raise ValueError(
            "pretrain_mamba.py needs --hybrid-layer-pattern, one symbol per layer: "
            f'{known_symbols()}. For example --hybrid-layer-pattern "M*-M-". (pretrain_gpt.py trains a GPT.)'
        )
    flag, pattern = found
    if args.hybrid_layer_pattern is not None:
        args.hybrid_override_pattern = None
    check_hybrid_pattern(pattern, flag, transformer_engine=args.transformer_impl == "transformer_engine")
    if args.num_layers is not None:
        check_layer_count(pattern, flag, args.num_layers)
    _check_stages(args, pattern, flag)
    _check_prediction_depths(args, pattern, flag)
    _check_experts(args, pattern, flag)
    if "M" in pattern:
        _check_mamba_sizes(args)


def _check_stages(args: Namespace, pattern: str, flag: str) -> None:
    stages = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if stages > 1 and (first, last) != (None, None) and PIPE not in pattern:
        check_uneven_stages(pattern, flag, stages, first, last)
    else:
        check_pipeline_segments(pattern, flag, stages)


def _check_prediction_depths(args: Namespace, pattern: str, flag: str) -> None:
    """The prediction depths are those of the pattern: upstream only warns, and trains without the others."""
    main, *depths = pattern.split(DEPTH)
    older = args.mtp_hybrid_override_pattern
    if older is not None and depths[:1] != [older]:
        whole = DEPTH.join([main, *[older] * (args.mtp_num_layers or 1)])
        raise ValueError(
            "--mtp-hybrid-override-pattern is the older way to say what a prediction depth has; write the depths into "
            f'the pattern: {flag} "{whole}"'
        )
    if args.mtp_num_layers is not None and args.mtp_num_layers != len(depths):
        remedy = "leave --mtp-num-layers out, the pattern says it"
        if not depths:
            remedy = f'say what each has, for example {flag} "{DEPTH.join([main, *"*" * args.mtp_num_layers])}"'
        raise ValueError(f"--mtp-num-layers is {args.mtp_num_layers}, {flag} has {len(depths)} depths; {remedy}")


def _check_experts(args: Namespace, pattern: str, flag: str) -> None:
    if "E" in pattern and args.num_experts is None:
        raise pointed_error(f"'E' of {flag} is an MoE layer, which needs --num-experts", pattern, pattern.find("E"))
    if "E" not in pattern and args.num_experts is not None:
        raise ValueError(
            f"--num-experts is {args.num_experts}, and '{pattern}' has no E, a layer with experts; give {flag} one, or "
            "leave --num-experts out"
        )
    if args.moe_layer_freq != 1:
        raise ValueError(
            f"--moe-layer-freq is {args.moe_layer_freq}; which layers of a hybrid have experts is said by each E of "
            f"{flag}: leave --moe-layer-freq out"
        )


def _check_mamba_sizes(args: Namespace) -> None:
    """The heads and groups of a Mamba layer divide, among each other and over tensor parallel ranks."""
    heads, groups, ranks = args.mamba_num_heads, args.mamba_num_groups, args.tensor_model_parallel_size
    sizes = {"--mamba-head-dim": args.mamba_head_dim, "--mamba-num-groups": groups, "--mamba-num-heads": heads}
    for option, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{option} is {size}; 1 or more is wanted")
    how = "--mamba-num-heads"
    if heads is None:
        if args.hidden_size is None:
            return  # upstream says so
        features = _EXPANSION * args.hidden_size
        how = f"{_EXPANSION} x --hidden-size {args.hidden_size} / --mamba-head-dim {args.mamba_head_dim}"
        if features % args.mamba_head_dim:
            raise ValueError(f"a Mamba layer has {how} heads, which is no whole number; give another --mamba-head-dim")
        heads = features // args.mamba_head_dim
    if heads % groups:
        raise ValueError(
            f"the {heads} heads of a Mamba layer ({how}) do not divide among --mamba-num-groups {groups}; give a "
            f"number of groups that divides {heads}"
        )
    for what, number in ((f"heads of a Mamba layer ({how})", heads), ("groups (--mamba-num-groups)", groups)):
        if number % ranks:
            raise ValueError(
                f"the {number} {what} do not divide among --tensor-model-parallel-size {ranks}; each rank takes as many"
            )


def refuse_hybrid_arguments(args: Namespace) -> None:
    """Raise ValueError for a pattern given to a script that builds no hybrid model."""
    for flag, name in _NAMES.items():
        if getattr(args, name) is not None:
            whose = " (--use-checkpoint-args takes it from the checkpoint)" if args.use_checkpoint_args else ""
            raise ValueError(f"{flag}{whose} describes a hybrid model: give it to pretrain_mamba.py, or leave it out")
