"""Whole training steps of several models in one process: what tools/benchmark_training.py times.

    with training_machine("gpt") as machine:
        model = machine.build(["--num-layers", "12", "--hidden-size", "512", ..., "--wide-residual", "4"])
        loss = model.step()              # zero the gradients, forward, backward, optimizer

Models are built from Megatron's flags by the code that pretrain_gpt.py and pretrain_mamba.py use: their argument
parsing, model builders, data-parallel wrapper, schedule and optimizer. Only the data is made up: one batch of random
tokens, the same for every model.

What always holds: one process and no checkpoint; models of one seed start with the same base weights.
"""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from benchmarking import peak_rise
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.training import get_megatron_optimizer_config

from megatron.core import parallel_state
from megatron.cpu.host import Host, training_host
from megatron.cpu.replacements import Replacements
from megatron.patches import apply_patches, mixed_parameter_dtypes
from megatron.training.model_kinds import MODEL_KINDS, ModelKind
from megatron.training.model_summary import print_model_summary
from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, validated_arguments

_SEED = 1234


@dataclass
class TrainingModel:
    """A model with its optimizer, and a batch to train it on."""

    args: Namespace
    chunks: list[Any]
    optimizer: Any
    batch: dict[str, torch.Tensor]

    def step(self) -> float:
        """One training step; returns its loss, for which a GPU has been waited."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=None,
            model=self.chunks,
            num_microbatches=1,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            decoder_seq_length=self.args.seq_length,
            forward_only=False,
        )
        self.optimizer.step()
        return float(found[0]["loss"])

    def _forward(self, _: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        batch = self.batch
        losses_bs = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])

        def mean(losses_bs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses_bs.float().mean()
            return loss, {"loss": loss.detach()}

        return losses_bs, mean

    def held_bytes(self) -> int:
        """Bytes between two steps: parameters, gradients and the optimizer's state."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        inner = [optimizer.optimizer for optimizer in optimizers]
        tensors = [p for chunk in self.chunks for p in chunk.parameters()]
        tensors += [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for optimizer in inner for state in optimizer.state.values() for v in _tensors(state.values())]
        tensors += [b.grad_data for chunk in self.chunks for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def peak_bytes(self) -> int:
        """The most that is allocated at any moment of a step, what is held between steps included."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return self.held_bytes() + peak_rise(self.step, device)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


@dataclass
class TrainingMachine:
    """This process, ready to build models of one kind."""

    host: Host
    kind: ModelKind

    def build(self, flags: list[str]) -> TrainingModel:
        """Build a model, its optimizer and its batch. Raises LocalChoiceError or AssertionError for refused flags."""
        args = self._arguments(flags)
        with contextlib.redirect_stdout(io.StringIO()):
            container = pretrain_cfg_container_from_args(args, self.kind.config(args))
            model_config = container.model
            model_config.pre_wrap_hooks = [
                hook for hook in model_config.pre_wrap_hooks if hook is not print_model_summary
            ]
            torch.manual_seed(_SEED)
            model_parallel_cuda_manual_seed(_SEED, force_reset_rng=True)
            chunks = model_config.get_builder_cls()(model_config).build_distributed_models(
                ProcessGroupCollection.use_mpu_process_groups(), ddp_config=container.ddp, wrap_with_ddp=True
            )
            optimizer_config, overrides = get_megatron_optimizer_config(args)
            optimizer = get_megatron_optimizer(optimizer_config, chunks, config_overrides=overrides)
        for chunk in chunks:
            chunk.train()
            get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
            get_model_config(chunk).grad_scale_func = optimizer.scale_loss
        for group in optimizer.param_groups:
            group["lr"] = args.lr
        return TrainingModel(args, chunks, optimizer, _batch(args))

    def _arguments(self, flags: list[str]) -> Namespace:
        before, sys.argv = sys.argv, [sys.argv[0], *flags]
        extensions = (ArgumentExtension(lambda parser: parser, before_validation=self.kind.check), *ARGUMENT_EXTENSIONS)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                args = validated_arguments(self.host, extensions)
        finally:
            sys.argv = before
        args.padded_vocab_size = args.vocab_size
        return args


def _batch(args: Namespace) -> dict[str, torch.Tensor]:
    device, length = torch.cuda.current_device(), args.seq_length
    generator = torch.Generator().manual_seed(1)
    shape = (args.micro_batch_size, length)
    tokens_bs = torch.randint(0, args.vocab_size, shape, generator=generator).to(device)
    return {
        "tokens": tokens_bs,
        "labels": tokens_bs.roll(-1, 1),
        "positions": torch.arange(length, device=device).expand_as(tokens_bs),
        "mask": torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1),
    }


@contextlib.contextmanager
def training_machine(kind: str) -> Iterator[TrainingMachine]:
    """This machine as the only process of a Megatron run; kind is "gpt" or "hybrid"."""
    with contextlib.redirect_stdout(io.StringIO()), training_host() as host, Replacements() as replaced:
        MODEL_KINDS[kind].prepare(replaced, host)
        apply_patches(mixed_parameter_dtypes.PATCHES, replaced)
        backend = "nccl" if host == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(_SEED)
        try:
            with contextlib.redirect_stdout(sys.__stdout__):
                yield TrainingMachine(host, MODEL_KINDS[kind])
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
