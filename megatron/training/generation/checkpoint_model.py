"""Builds the model of a checkpoint from the arguments that it stores, on one process, and loads it strictly.

    with training_host() as host, open_checkpoint(find_checkpoint(folder), host) as loaded:
        loaded.model, loaded.tokenizer, loaded.args, loaded.context_length

A torch_dist checkpoint is read whole whatever layout it was trained in; a plain one must have been trained without
model parallelism. The model is built as the training script of its kind builds it (megatron/training/model_kinds.py).

What always holds: the keys of the checkpoint's model and of the built one are the same, else nothing is loaded; a
checkpoint that cannot be used is a GenerationError; on exit Megatron's global state is gone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_tokenizer

from megatron.cpu.host import Host
from megatron.cpu.replacements import Replacements
from megatron.patches.offline_tokenizers import install_tokenizers
from megatron.training.data.errors import DataError
from megatron.training.earlier_experts import set_aside_earlier_experts
from megatron.training.generation.checkpoint_location import CheckpointLocation, checkpoint_errors
from megatron.training.generation.errors import GenerationError
from megatron.training.generation.stored_arguments import restore_model_arguments, stored_hybrid_pattern
from megatron.training.generation.strict_loading import load_plain, load_sharded
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.model_kinds import MODEL_KINDS, ModelKind
from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, parse_training_arguments
from megatron.training.resume.stored import stored_common
from megatron.training.wide_residual_arguments import wide_residual_config_from_args

_LAYOUT = (
    ("tensor_model_parallel_size", "TP"),
    ("pipeline_model_parallel_size", "PP"),
    ("expert_model_parallel_size", "EP"),
)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what is needed to use it."""

    model: Any
    tokenizer: Any
    args: argparse.Namespace
    kind: str
    location: CheckpointLocation

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and continuation may have together."""
        return int(self.args.max_position_embeddings)


@dataclass
class _Stored:
    """What is read before the model is there: `state` has the model's weights too in the plain format."""

    args: argparse.Namespace
    state: dict[str, Any]

    @property
    def kind(self) -> str:
        """The row of MODEL_KINDS that this model belongs to."""
        return "gpt" if stored_hybrid_pattern(self.args) is None else "hybrid"


def _read_stored(location: CheckpointLocation, args: argparse.Namespace) -> _Stored:
    """Read the arguments that the checkpoint stores."""
    with checkpoint_errors():
        state = stored_common(location)
    stored = state.get("args")
    if stored is None:
        raise GenerationError(
            f"{location.folder} stores no training arguments, so its model is unknown. A checkpoint that "
            "pretrain_gpt.py saved has them."
        )
    sizes = {short: getattr(stored, name, None) or 1 for name, short in _LAYOUT}
    if location.format == "torch" and any(size > 1 for size in sizes.values()):
        layout = ", ".join(f"{short} {size}" for short, size in sizes.items() if size > 1)
        raise GenerationError(
            f"{location.folder} was saved by {layout} in the plain format (--ckpt-format torch), which one process "
            "cannot put together. Convert it: python tools/checkpoint/convert.py reshard --load "
            f"{location.load} --save FOLDER --format torch_dist"
        )
    return _Stored(stored, state)


def _command_line(location: CheckpointLocation) -> list[str]:
    """Upstream's options for reading this checkpoint; the model's come from what it stores."""
    options = ["--load", str(location.load), "--ckpt-format", location.format, "--micro-batch-size", "1"]
    options += ["--no-load-optim", "--no-load-rng"]
    return options if location.step is None else [*options, "--ckpt-step", str(location.step)]


def _parse(location: CheckpointLocation, host: Host, replaced: Replacements) -> tuple[argparse.Namespace, _Stored]:
    """Return validated arguments with those of the checkpoint's model, and what it stores."""
    parsers: list[argparse.ArgumentParser] = []
    read: list[_Stored] = []

    def keep_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return parser

    def restore(args: argparse.Namespace) -> None:
        read.append(_read_stored(location, args))
        restore_model_arguments(args, read[0].args, parsers[0], host)
        kind = MODEL_KINDS[read[0].kind]
        kind.prepare(replaced, host)
        kind.check(args)

    # Only the flags of the extensions: their checks compare a command line with a checkpoint, and here is none.
    flags = [ArgumentExtension(extension.add) for extension in ARGUMENT_EXTENSIONS]
    replaced.set(sys, "argv", ["generate", *_command_line(location)])
    args = parse_training_arguments(host, [*flags, ArgumentExtension(keep_parser, before_validation=restore)])
    return args, read[0]


def _build(kind: ModelKind, args: argparse.Namespace) -> Any:
    """Build the model on this process's device, in the precision of its training, without weights worth having."""
    config = kind.config(args)
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False, data_parallel_random_init=False)
    return model.eval()


@contextmanager
def open_checkpoint(location: CheckpointLocation, host: Host) -> Iterator[LoadedModel]:
    """Build and load the model of a checkpoint on this process; everything global is undone on exit.

    Raises:
        GenerationError: a checkpoint that cannot be read, whose kind is not served, or whose model is another one; more
            than one process.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise GenerationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}; one process is wanted: start it without torchrun or srun."
        )
    with Replacements() as replaced:
        install_tokenizers(replaced)
        set_aside_earlier_experts(replaced)
        try:
            with _choices_reported(location):
                args, stored = _parse(location, host, replaced)
                training.initialize_megatron(store=torch.distributed.HashStore())
                kind = stored.kind
                model = _build(MODEL_KINDS[kind], args)
            load = load_sharded if location.format == "torch_dist" else load_plain
            load(unwrap_model(model), location, stored.state)
            del stored
            yield LoadedModel(model, get_tokenizer(), args, kind, location)
        finally:
            training.destroy_global_state()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


@contextmanager
def _choices_reported(location: CheckpointLocation) -> Iterator[None]:
    try:
        yield
    except (LocalChoiceError, DataError) as error:
        raise GenerationError(f"the model of {location.folder} cannot be built here: {error}") from error


def describe(loaded: LoadedModel) -> str:
    """One line on the model: kind, streams, step, precision."""
    layout = wide_residual_config_from_args(loaded.args)
    streams = "one residual stream" if layout is None else f"{layout.num_streams} residual streams"
    step = "release" if loaded.location.step is None else f"step {loaded.location.step}"
    precision = str(loaded.args.params_dtype).removeprefix("torch.")
    kind = {"gpt": "GPT", "hybrid": "hybrid model"}[loaded.kind]
    return f"{kind}, {streams}, {step}, {precision}, context of {loaded.context_length} tokens"
