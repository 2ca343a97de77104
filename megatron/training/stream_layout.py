"""What the memory of a model's residual streams depends on, from Megatron's configuration.

    costs = stream_costs(config, num_streams=4)           # bytes per token of the tensors around a branch
    loads = stage_loads(args, config)                     # layers and micro-batches in flight of every model chunk
    best_block_size(loads, costs)                         # what --residual-stream-recompute-num-layers auto takes

What a norm and a dropout save differs between devices and PyTorch versions, so it is counted here, on this device, with
tensors of one token. Norms are taken for those of the local layer specs, PyTorch's.

What always holds: `auto` and tools/report_stream_memory.py choose the replay block from these two functions.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.transformer.streamwise_residual_backends import streamwise_operators
from megatron.core.transformer.streamwise_residual_norm import stream_norm_of
from megatron.training.held_memory import saved_by
from megatron.training.layer_kinds import is_hybrid, layers_in, pairs_of, stage_kinds, writes_bias
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
    has_bias: bool | None = None,
) -> StreamCosts:
    """Return the costs of num_streams streams under an ordinary config's widths, dtypes, norms and dropout.

    has_bias says whether updates have biases, by default as the config says of linear layers.
    """
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
        has_bias=(config.add_bias_linear if has_bias is None else has_bias)
        and not operators.fuses_bias(stream_dtype, branch_dtype),
        mask_bytes=mask_bytes,
        norm_bytes=norm_bytes,
        norm_saves_input=norm_saves_input,
        fused_norm_bytes=_STATISTICS_BYTES[config.normalization] if fuses else None,
        branches_per_layer=branches_per_layer,
        learned_retention=learned_retention,
    )


def model_costs(
    args: Namespace, config: TransformerConfig, num_streams: int, kinds: Collection[str], *, retention: bool = False
) -> StreamCosts:
    """Return the costs of the streams around layers of these kinds; a layer of a hybrid has one branch, of a GPT two.

    Where some kinds write biases, all are taken to.
    """
    return stream_costs(
        config,
        num_streams,
        branches_per_layer=1 if is_hybrid(args) else BRANCHES_PER_LAYER,
        learned_retention=retention,
        has_bias=config.add_bias_linear and any(map(writes_bias, kinds)),
    )


def forwards_in_flight(args: Namespace, config: TransformerConfig, stages: Sequence[Sequence[object]]) -> list[int]:
    """Return the forwards of a model chunk that every pipeline stage keeps at once; stages are [stage][chunk]."""
    micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return [
        micro_batches_in_flight(
            stage,
            len(stages),
            micro_batches,
            chunks=len(chunks),
            group_size=config.microbatch_group_size_per_vp_stage,
        )
        for stage, chunks in enumerate(stages)
    ]


def chunk_load(kinds: Sequence[str], in_flight: int) -> StageLoad:
    """Return the load of a model chunk of these kinds."""
    return StageLoad(sum(map(layers_in, kinds)), in_flight, pairs_of(kinds))


def stage_loads(args: Namespace, config: TransformerConfig) -> list[StageLoad]:
    """Return the load of every model chunk of every pipeline stage, for validated arguments."""
    stages = stage_kinds(args, config)
    in_flight = forwards_in_flight(args, config, stages)
    return [chunk_load(kinds, forwards) for chunks, forwards in zip(stages, in_flight, strict=True) for kinds in chunks]


def choose_block_size(args: Namespace, config: TransformerConfig, num_streams: int) -> int:
    """Return the replay block that `--residual-stream-recompute-num-layers auto` takes."""
    kinds = {kind for chunks in stage_kinds(args, config) for chunk in chunks for kind in chunk}
    return best_block_size(stage_loads(args, config), model_costs(args, config, num_streams, kinds))
