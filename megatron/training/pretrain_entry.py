"""What the pretraining scripts share: host, arguments, model configuration, data and upstream's trainer.

    from megatron.training.model_kinds import MODEL_KINDS
    from megatron.training.pretrain_entry import main

    sys.exit(main(MODEL_KINDS["gpt"]))

`main` runs, in this order: choose the host, parse upstream's arguments plus ours with defaults that fit the machine,
restore arguments from a checkpoint where asked, validate, build the model's configuration, train.

How to add to it: a flag group is an `ArgumentExtension` in `ARGUMENT_EXTENSIONS` (its flags, and what is to be checked
or derived before and after upstream validates); a model kind is a `ModelKind` (model_kinds.py).

What always holds: an option that the user gives is never changed, and without any flag of ours the model is upstream's.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron.cpu.allocator import keep_freed_memory
from megatron.cpu.host import Host, HostChoiceError, training_host
from megatron.training.model_kinds import ModelKind, as_choice_error


def _nothing_to_do(args: argparse.Namespace) -> None:
    """An extension that has nothing to check at this point."""


@dataclass(frozen=True)
class ArgumentExtension:
    """A group of flags: `add` puts them on the parser; `before_restoring` runs on the parsed arguments, `restoring`
    once upstream took over those of a checkpoint (--use-checkpoint-args), `before_validation` after that,
    `after_validation` on the validated ones."""

    add: Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
    before_restoring: Callable[[argparse.Namespace], None] = _nothing_to_do
    restoring: Callable[[argparse.Namespace], None] = _nothing_to_do
    before_validation: Callable[[argparse.Namespace], None] = _nothing_to_do
    after_validation: Callable[[argparse.Namespace], None] = _nothing_to_do


def _no_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """An extension that checks flags of upstream's."""
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.training.resume.model_arguments import MODEL_ARGUMENTS
    from megatron.training.resume.preflight import add_checkpoint_args

    MODEL_ARGUMENTS.parser = add_checkpoint_args(parser)
    return MODEL_ARGUMENTS.parser


def _check_checkpoint(args: argparse.Namespace) -> None:
    from megatron.training.resume.model_arguments import MODEL_ARGUMENTS
    from megatron.training.resume.preflight import check_before_start

    check_before_start(args)
    MODEL_ARGUMENTS.note(args)


def _restore_model_arguments(args: argparse.Namespace) -> None:
    from megatron.training.resume.model_arguments import MODEL_ARGUMENTS

    MODEL_ARGUMENTS.restore(args)


def _check_model_arguments(args: argparse.Namespace) -> None:
    from megatron.training.resume.model_arguments import MODEL_ARGUMENTS

    MODEL_ARGUMENTS.check(args)


def _add_wide_residual(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.training.wide_residual_arguments import add_wide_residual_args

    return add_wide_residual_args(parser)


def _check_wide_residual(args: argparse.Namespace) -> None:
    """Restore the stream layout of a checkpoint where asked, and refuse one that cannot be."""
    from megatron.training.wide_residual_arguments import (
        check_replay_arguments,
        check_stream_backend,
        check_stream_dtype,
        wide_residual_config_from_args,
    )
    from megatron.training.wide_residual_checkpoint import restore_and_check_stream_layout

    with as_choice_error():
        restore_and_check_stream_layout(args)
        wide_residual_config_from_args(args)
        check_replay_arguments(args)
        check_stream_dtype(args)
        check_stream_backend(args)


def _record_wide_residual(args: argparse.Namespace) -> None:
    from megatron.training.wide_residual_checkpoint import record_stream_layout

    record_stream_layout(args)


def _add_shortcut_moe(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.training.shortcut_moe_arguments import add_shortcut_moe_args

    return add_shortcut_moe_args(parser)


def _check_shortcut_moe(args: argparse.Namespace) -> None:
    from megatron.training.shortcut_moe_arguments import check_shortcut_moe_arguments

    with as_choice_error():
        check_shortcut_moe_arguments(args)


def _add_run_logs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.training.run_log_arguments import add_run_log_args

    return add_run_log_args(parser)


def _check_run_logs(args: argparse.Namespace) -> None:
    from megatron.training.run_log_arguments import check_run_log_arguments

    with as_choice_error():
        check_run_log_arguments(args)


def _identify_run(args: argparse.Namespace) -> None:
    from megatron.run_control.trainer_side import identify_run
    from megatron.training.run_log_arguments import complete_run_log_arguments

    complete_run_log_arguments(args)
    with as_choice_error():
        identify_run(args)


# In this order: the check of wide streams restores what a checkpoint stores, the flags of shortcut MoE included.
ARGUMENT_EXTENSIONS = (
    ArgumentExtension(
        _add_checkpoint,
        before_restoring=_check_checkpoint,
        restoring=_restore_model_arguments,
        after_validation=_check_model_arguments,
    ),
    ArgumentExtension(
        _add_wide_residual, before_validation=_check_wide_residual, after_validation=_record_wide_residual
    ),
    ArgumentExtension(_add_shortcut_moe, before_validation=_check_shortcut_moe),
    ArgumentExtension(_add_run_logs, before_validation=_check_run_logs, after_validation=_identify_run),
)


def validated_arguments(
    host: Host, extensions: Iterable[ArgumentExtension] = ARGUMENT_EXTENSIONS
) -> argparse.Namespace:
    """Parse sys.argv with upstream's parser, the extensions and this machine's defaults, and validate it.

    The steps are those of upstream's `parse_and_validate_args`, with the extensions' checks between them. Raises
    LocalChoiceError for an option that cannot work here.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint

    from megatron.training.local_defaults import (
        LocalChoiceError,
        check_local_choices,
        describe_local_defaults,
        repair_help,
        set_local_defaults,
        upstream_refusals,
    )

    extensions = tuple(extensions)
    changed = []

    def add_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for extension in extensions:
            parser = extension.add(parser)
        changed.extend(set_local_defaults(parser, host))
        repair_help(parser)
        return parser

    args = parse_args(add_ours)
    if args.yaml_cfg is not None:
        raise LocalChoiceError("--yaml-cfg is not supported here: give the options on the command line.")
    for extension in extensions:
        extension.before_restoring(args)
    if args.use_checkpoint_args:
        if args.load is None and args.pretrained_checkpoint is None:
            raise LocalChoiceError("--use-checkpoint-args needs --load or --pretrained-checkpoint.")
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
        for extension in extensions:
            extension.restoring(args)
    check_local_choices(args, host)
    line = describe_local_defaults(changed, args)
    if line is not None and args.rank == 0:
        print(line, flush=True)
    for extension in extensions:
        extension.before_validation(args)
    with upstream_refusals():
        validate_args(args)
    for extension in extensions:
        extension.after_validation(args)
    return args


def parse_training_arguments(
    host: Host, extensions: Iterable[ArgumentExtension] = ARGUMENT_EXTENSIONS
) -> argparse.Namespace:
    """Return `validated_arguments`, made global (tokenizer, loggers, micro-batch calculator)."""
    from megatron.training.global_vars import set_global_variables

    from megatron.cpu.replacements import Replacements
    from megatron.patches import apply_patches
    from megatron.training.run_logs.writers import PATCHES

    args = validated_arguments(host, extensions)
    with Replacements() as replaced:
        apply_patches(PATCHES, replaced)
        set_global_variables(args)
    return args


def _patches_of_run(args: argparse.Namespace) -> list[Any]:
    """What has to be different in upstream for a run with these arguments."""
    from megatron.patches import (
        distributed_torch_adam,
        mixed_parameter_dtypes,
        retention_weight_decay,
    )
    from megatron.training import model_flops
    from megatron.training.resume import staged_save, strict_load

    patches: list[Any] = [*strict_load.PATCHES, *staged_save.PATCHES]
    if args.hybrid_layer_pattern is not None or args.num_experts is not None:
        patches.append(model_flops.PATCH)
    if args.use_distributed_optimizer:
        patches += distributed_torch_adam.PATCHES
    if args.wide_residual is not None:
        patches += mixed_parameter_dtypes.PATCHES
    if args.wide_residual_learned_retention:
        patches.append(retention_weight_decay.PATCH)
    if args.log_streams_interval:
        from megatron.training.stream_health import monitor

        patches += monitor.PATCHES
    return patches


def _watched(model_config: Any, args: argparse.Namespace) -> Any:
    """Have the model's streams reported while it trains, where it has some."""
    if args.log_streams_interval:
        from megatron.training.stream_health.monitor import attach_monitor

        model_config.pre_wrap_hooks.append(functools.partial(attach_monitor, args=args))
    return model_config


def train(host: Host, kind: ModelKind, store: Any = None) -> None:
    """Parse the arguments and run upstream's trainer on this host.

    `store` is the torch.distributed store through which the processes meet; without it they meet as their launcher
    (torchrun, SLURM) says, and a process started without one is alone.
    """
    import torch
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.global_vars import get_tokenizer
    from megatron.training.training import pretrain, set_startup_timestamps

    from megatron.cpu.replacements import Replacements
    from megatron.patches import apply_patches
    from megatron.patches.offline_tokenizers import install_tokenizers
    from megatron.run_control.heartbeat import beating, join_run
    from megatron.run_control.trainer_side import leaving_on_request
    from megatron.training.data.unigram import describe_unigram_entropy
    from megatron.training.earlier_experts import set_aside_earlier_experts
    from megatron.training.language_batches import forward_step
    from megatron.training.local_defaults import upstream_refusals
    from megatron.training.run_logs.writers import closing_writers
    from megatron.training.text_datasets import check_corpus, train_valid_test_datasets_provider

    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    if store is None and "WORLD_SIZE" not in os.environ:
        store = torch.distributed.HashStore()  # alone: no address to meet at
    with Replacements() as replaced:
        set_aside_earlier_experts(replaced)
        install_tokenizers(replaced)
        kind.prepare(replaced, host)
        args = parse_training_arguments(
            host, (ArgumentExtension(_no_flags, before_validation=kind.check), *ARGUMENT_EXTENSIONS)
        )
        check_corpus(args, get_tokenizer())
        if args.rank == 0 and (line := describe_unigram_entropy(args)) is not None:
            print(f"> {line}", flush=True)
        apply_patches(_patches_of_run(args), replaced)
        with upstream_refusals():
            config = kind.config(args)
        with closing_writers(), leaving_on_request():
            pretrain(
                pretrain_cfg_container_from_args(args, _watched(config, args)),
                train_valid_test_datasets_provider,
                ModelType.encoder_or_decoder,
                beating(forward_step, join_run()),
                store=store,
            )
    torch.distributed.destroy_process_group()


_PROGRAM_START = time.time()


def main(kind: ModelKind) -> int:
    """Run a training script; returns its exit status: 0, or 2 for an option, a corpus or a checkpoint that cannot be
    used, and for a checkpoint that could not be saved."""
    import torch

    from megatron.training.data.errors import DataError
    from megatron.training.local_defaults import LocalChoiceError
    from megatron.training.resume.errors import CheckpointError

    try:
        with training_host() as host:
            if host == "cpu" and not keep_freed_memory() and int(os.environ.get("RANK", "0")) == 0:
                print("> malloc: left as it is (not glibc's, or set up by its own variables)", flush=True)
            train(host, kind)
    except (HostChoiceError, LocalChoiceError, DataError, CheckpointError) as error:
        # Before the processes have met they all find the same, but for what each node has on its disk; later it may be
        # one rank's alone.
        of_node = isinstance(error, CheckpointError) and int(os.environ.get("LOCAL_RANK", "0")) == 0
        met = torch.distributed.is_initialized() and not getattr(error, "on_all_ranks", False)
        if int(os.environ.get("RANK", "0")) == 0 or met or (of_node and not torch.distributed.is_initialized()):
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
