"""What the memory of a model's residual streams depends on, from Megatron's configuration.

    costs = stream_costs(config, num_streams=4)           # bytes per token of the tensors around a branch
    stages = stage_loads(args, config)                    # layers and micro-batches in flight of every pipeline stage
    best_block_size(stages, costs)                        # what --residual-stream-recompute-num-layers auto takes

What a norm and a dropout save differs between devices and PyTorch versions, so it is counted here, on this device, with
tensors of one token. Norms are taken for those of the local layer specs, PyTorch's.

What always holds: `auto` and tools/report_stream_memory.py choose the replay block from these two functions.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.transformer.streamwise_residual_backends import streamwise_operators
from megatron.core.transformer.streamwise_residual_norm import stream_norm_of
from megatron.training.held_memory import saved_by
from megatron.training.hybrid_patterns import pipeline_segments
from megatron.training.stream_memory import (
    BRANCHES_PER_LAYER,
    StageLoad,
    StreamCosts,
    best_block_size,
    micro_batches_in_flight,
)

_NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
_STATISTICS_BYTES = {"LayerNorm": 8, "RMSNorm": 4}  # fp32 numbers that a norm keeps of a token as part of a read


def stream_costs(
    config: TransformerConfig,
    num_streams: int,
    *,
    branches_per_layer: int = BRANCHES_PER_LAYER,
    learned_retention: bool = False,
) -> StreamCosts:
    """Return the costs of num_streams streams under an ordinary config's widths, dtypes, norms and dropout."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, branch_dtype = config.hidden_size, config.params_dtype
    stream_dtype = torch.float32 if config.fp32_residual_connection else branch_dtype

    def one_token(dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(1, width, dtype=dtype, device=device)

    norm = _NORMS[config.normalization](width, eps=config.layernorm_epsilon).to(device, branch_dtype)
    with torch.enable_grad(), torch.random.fork_rng():
        norm_bytes, norm_saves_input = saved_by(norm, one_token(branch_dtype))
        mask_bytes = 0
        if config.hidden_dropout > 0:
            mask_bytes, _ = saved_by(torch.nn.Dropout(config.hidden_dropout), one_token(stream_dtype))
    operators, fused = streamwise_operators(device), stream_norm_of(norm)
    fuses = fused is not None and operators.fuses_norm(width, stream_dtype, branch_dtype, torch.float32)
    return StreamCosts.of_layout(
        num_streams,
        width,
        branch_itemsize=branch_dtype.itemsize,
        stream_itemsize=stream_dtype.itemsize,
        has_bias=config.add_bias_linear and not operators.fuses_bias(stream_dtype, branch_dtype),
        mask_bytes=mask_bytes,
        norm_bytes=norm_bytes,
        norm_saves_input=norm_saves_input,
        fused_norm_bytes=_STATISTICS_BYTES[config.normalization] if fuses else None,
        branches_per_layer=branches_per_layer,
        learned_retention=learned_retention,
    )


def chunk_layers(config: TransformerConfig) -> list[list[int]]:
    """Return the number of layers of every model chunk of every pipeline stage: [stage][chunk]."""
    chunks = config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    return [
        [
            get_num_layers_to_build(config, vp_stage=chunk if chunks else None, pp_rank=stage)
            for chunk in range(chunks or 1)
        ]
        for stage in range(config.pipeline_model_parallel_size)
    ]


def hybrid_chunk_layers(pattern: str, config: TransformerConfig) -> list[list[int]]:
    """The same for the stack of a hybrid pattern."""
    stages = config.pipeline_model_parallel_size
    ends = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    sizes = [len(segment) for _, segment in pipeline_segments(pattern, stages, *ends)]
    return [sizes[stage::stages] for stage in range(stages)]


def stage_loads(args: Namespace, config: TransformerConfig) -> list[StageLoad]:
    """Return the largest chunk and the forwards in flight of every pipeline stage, for validated arguments."""
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    pattern = args.hybrid_layer_pattern
    layers = chunk_layers(config) if pattern is None else hybrid_chunk_layers(pattern, config)
    return [
        StageLoad(
            max(chunks),
            micro_batches_in_flight(
                stage,
                len(layers),
                micro_batches,
                chunks=len(chunks),
                group_size=config.microbatch_group_size_per_vp_stage,
            ),
        )
        for stage, chunks in enumerate(layers)
    ]


def choose_block_size(args: Namespace, config: TransformerConfig, num_streams: int) -> int:
    """Return the replay block that `--residual-stream-recompute-num-layers auto` takes.

    A layer of a hybrid stack has one branch, one of a GPT two.
    """
    branches = BRANCHES_PER_LAYER if args.hybrid_layer_pattern is None else 1
    return best_block_size(stage_loads(args, config), stream_costs(config, num_streams, branches_per_layer=branches))
