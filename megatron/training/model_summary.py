"""The lines about the model that a run prints at its start.

    model_config.pre_wrap_hooks.append(print_model_summary)

prints on rank 0, for example,

    > parameters: 10,626,048 base + 3,200 controllers
    > residual: 4 streams of width 256 (1,024 carried, torch.bfloat16) for 12 branches; beside one stream, per token ...

What always holds: parameters are those of the whole model, each counted once however it is sharded or replicated;
controllers count their active elements, without the padding.
"""

from __future__ import annotations

from argparse import Namespace

import megatron.training.training as training
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args, get_tensorboard_writer

from megatron.core.transformer.streamwise_residual_backends import describe_backend
from megatron.core.transformer.wide_residual import StreamwiseSigmoidWideResidualConnection
from megatron.core.transformer.wide_residual_config import get_wide_residual_config
from megatron.training.model_flops import stream_flops_per_token


def count_parameters(model_chunks: list[MegatronModule]) -> tuple[int, int]:
    """Return (base parameters, controller elements in use) of the whole model; collective over the pipeline ranks."""
    pg_collection = model_chunks[0].pg_collection
    wide_residual = get_wide_residual_config(get_model_config(model_chunks[0]))
    base = controllers = 0
    for chunk in model_chunks:
        for param in chunk.parameters():
            if hasattr(param, "residual_controller"):
                controllers += wide_residual.num_streams if wide_residual is not None else 0
                continue
            if getattr(param, "shared", False) and not chunk.pre_process:
                continue  # the output layer's copy of a tied embedding
            expert = not getattr(param, "allreduce", True)
            sharded = getattr(param, "tensor_model_parallel", False)
            tensor_group = pg_collection.expt_tp if expert else pg_collection.tp
            copies = (pg_collection.ep.size() if expert else 1) * (tensor_group.size() if sharded else 1)
            base += param.numel() * copies
    counts = torch.tensor([base, controllers], dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(counts, group=pg_collection.pp)
    return int(counts[0]), int(counts[1])


def count_branches(model_chunks: list[MegatronModule]) -> int:
    """Return the branches of the whole model that write to its streams; collective over the pipeline ranks."""
    local = sum(
        isinstance(module, StreamwiseSigmoidWideResidualConnection) and module.operation == "write"
        for chunk in model_chunks
        for module in chunk.modules()
    )
    count = torch.tensor(local, dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(count, group=model_chunks[0].pg_collection.pp)
    return int(count)


def residual_line(config: object, branches: int, args: Namespace) -> str:
    """Describe the residual stream of config, and what it costs beyond the ordinary one, per token and per step.

    Args:
        branches: attention, Mamba, MLP and MoE branches of the whole model.
        args: the run's validated arguments.
    """
    width: int = config.__dict__["hidden_size"]
    wide_residual = get_wide_residual_config(config)
    if wide_residual is None:
        return f"residual: one stream of width {width}"
    streams = wide_residual.num_streams
    fp32_stream = config.fp32_residual_connection  # type: ignore[attr-defined]
    dtype = torch.float32 if fp32_stream else config.params_dtype  # type: ignore[attr-defined]
    unit = width * dtype.itemsize * branches
    # In units of D per branch: the ordinary stream moves 3, the wide one 3K + 2. A write that is one operation with the
    # next read keeps and moves less.
    kept, moved = (streams - 1) * unit, (3 * streams - 1) * unit
    flops = stream_flops_per_token(streams, width, branches, retention=wide_residual.learned_retention)
    step_tokens = args.global_batch_size * args.seq_length
    step_flops = training.num_floating_point_operations(args, args.global_batch_size)
    return (
        f"residual: {streams} streams of width {width} ({streams * width:,} carried, {dtype}) for {branches} branches; "
        f"beside one stream, per token up to {kept:,} more bytes of activations without replay and {moved:,} more "
        f"bytes moved in the forward, per step of {step_tokens:,} tokens {kept * step_tokens:,} and "
        f"{moved * step_tokens:,}; reads and writes add {flops * step_tokens / step_flops:.2%} to the model's FLOPs"
    )


def print_model_summary(model_chunks: list[MegatronModule]) -> list[MegatronModule]:
    """Print the summary on rank 0 and return the model as it is (a pre_wrap_hook of ModelConfig).

    Where the run writes TensorBoard, the counts are there as the texts `parameters/base` and `parameters/controllers`
    (a scalar is fp32 and holds no large count exactly).
    """
    base, controllers = count_parameters(model_chunks)
    branches = count_branches(model_chunks)
    writer = get_tensorboard_writer()
    if writer is not None:
        writer.add_text("parameters/base", str(base))
        writer.add_text("parameters/controllers", str(controllers))
    if torch.distributed.get_rank() == 0:
        print(f"> parameters: {base:,} base + {controllers:,} controllers", flush=True)
        config = get_model_config(model_chunks[0])
        print(f"> {residual_line(config, branches, get_args())}", flush=True)
        if get_wide_residual_config(config) is not None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            print(f"> streamwise operators: {describe_backend(device)}", flush=True)
    return model_chunks
