"""Ordered output-discard replay for residual-stream operations.

A wide stream costs K*D of saved activation per branch. Within a replay block the cheap operations, reads, the norms
that they feed and all writes but the last, are discarded after the forward and reconstructed in forward order in the
backward. Branch outputs stay in ordinary autograd, so no attention, MLP or MoE runs twice. Maps are static parameters:
replay needs only the block's input and the branch outputs, which the autograd graph holds anyway.

    for layer, context in zip(layers, build_residual_stream_recompute_plan(len(layers), block_size)):
        z, state = checkpoint_residual_read(read, x, context, fp32_residual_connection=False)
        x = checkpoint_residual_write(write, branch(norm(z)), state, context, ...)      # all but the block's last write
        ...
        if context.is_block_end: context.finalize(x)

What always holds: outputs and gradients are bit-equal to those without replay; a plan serves one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.tensor_parallel.checkpoint_manager import CheckpointWithoutOutputManager
from megatron.core.transformer.residual_connection import (
    ResidualBranchOutput,
    ResidualConnection,
    ResidualConnectionState,
)
from megatron.core.transformer.residual_recompute_blocks import block_ends
from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE, get_wide_residual_config

_R = TypeVar("_R")


@dataclass(frozen=True)
class ResidualStreamRecomputeContext:
    """One layer's immutable view of a shared residual-stream replay block.

    Args:
        manager: shared by the layers of the block.
        is_block_end: whether this layer is the block's last.
    """

    manager: CheckpointWithoutOutputManager
    is_block_end: bool

    def checkpoint(self, function: Callable[..., _R], *args: Any, fp8: bool = False) -> _R:
        """Run one cheap operation and register it for ordered replay."""
        return self.manager.checkpoint(function, *args, fp8=fp8)

    def finalize(self, hidden_states: Tensor) -> None:
        """Discard this block's registered outputs once its live boundary exists.

        Raises:
            RuntimeError: this layer does not end its block.
        """
        if not self.is_block_end:
            raise RuntimeError("only the last layer of a replay block finalizes it")
        self.manager.discard_all_outputs_and_register_recompute(hidden_states)


def residual_stream_recompute_enabled(config: TransformerConfig, training: bool) -> bool:
    """Return whether selective residual-stream replay is active for this forward.

    It is in training, with gradients enabled, for a wide config with granularity "selective" and "residual_stream"
    among its recompute modules.
    """
    return (
        training
        and torch.is_grad_enabled()
        and get_wide_residual_config(config) is not None
        and config.recompute_granularity == "selective"
        and RESIDUAL_STREAM_MODULE in (config.recompute_modules or ())
    )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); an int of {least} or more is wanted")
    if value < least:
        raise ValueError(f"{name} is {value}; {least} or more is wanted")


def _check_pairs(num_layers: int, atomic_layer_pairs: Sequence[tuple[int, int]]) -> set[int]:
    """Return the first layers of the pairs; ValueError for a pair that cannot be kept together."""
    firsts: set[int] = set()
    taken: set[int] = set()
    for pair in atomic_layer_pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"the layer pair {pair!r} is malformed; two zero-based layer indices are wanted")
        for index in pair:
            if isinstance(index, bool) or not isinstance(index, int):
                raise ValueError(f"the layer pair {pair!r} holds {index!r}; int layer indices are wanted")
            if not 0 <= index < num_layers:
                raise ValueError(f"the layer pair {pair!r} is outside the {num_layers} local layers")
            if index in taken:
                raise ValueError(f"layer {index} is in two layer pairs; pairs must be disjoint")
            taken.add(index)
        if pair[1] != pair[0] + 1:
            raise ValueError(f"the layers of the pair {pair!r} are not adjacent")
        firsts.add(pair[0])
    return firsts


def build_residual_stream_recompute_plan(
    num_layers: int,
    block_size: int | None,
    *,
    atomic_layer_pairs: Sequence[tuple[int, int]] = (),
) -> list[ResidualStreamRecomputeContext]:
    """Partition local physical layers into independent ordered replay blocks.

    A shortcut-MoE predecessor and its MoE layer share replay-owned intermediates, so no block ends between them.

    Args:
        num_layers: local physical layers, before any grouping into pairs.
        block_size: largest number of layers in a block; None takes the whole local stack. A pair stays whole even
            with block_size=1 and then makes a block of two.
        atomic_layer_pairs: disjoint pairs of adjacent zero-based local layers that must share a manager.

    Returns:
        One context per layer, sharing a manager within each block; only the last layer of a block has
        is_block_end=True. Four layers with block_size=3 and pairs (0, 1), (2, 3) make the blocks [0, 1] and [2, 3].

    Raises:
        ValueError: counts that are no ints or too small; malformed, overlapping, non-adjacent or foreign pairs.
    """
    _check_count("num_layers", num_layers, 0)
    if block_size is not None:
        _check_count("block_size", block_size, 1)
    firsts = _check_pairs(num_layers, atomic_layer_pairs)
    plan: list[ResidualStreamRecomputeContext] = []
    manager = CheckpointWithoutOutputManager()
    for is_block_end in block_ends(num_layers, block_size or max(num_layers, 1), firsts):
        plan.append(ResidualStreamRecomputeContext(manager, is_block_end))
        if is_block_end:
            manager = CheckpointWithoutOutputManager()
    return plan


def checkpoint_residual_read(
    connection: ResidualConnection,
    hidden_states: Tensor,
    context: ResidualStreamRecomputeContext,
    *,
    fp32_residual_connection: bool,
    branch_input_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ResidualConnectionState]:
    """Checkpoint a residual read while retaining its carried stream as state.

    An optional branch-input dtype request is captured by the replay closure so eager execution and backward
    reconstruction produce the same branch dtype. Arguments and results as a read of the connection.
    """
    return connection._checkpoint_read(
        hidden_states,
        context,
        fp32_residual_connection=fp32_residual_connection,
        branch_input_dtype=branch_input_dtype,
    )


def checkpoint_residual_read_norm(
    connection: ResidualConnection,
    hidden_states: Tensor,
    norm: StreamNorm,
    context: ResidualStreamRecomputeContext,
    *,
    fp32_residual_connection: bool,
) -> tuple[Tensor, ResidualConnectionState]:
    """Checkpoint a residual read and the norm that it feeds as one operation. Result as a read with norm."""
    return connection._checkpoint_read_norm(
        hidden_states, norm, context, fp32_residual_connection=fp32_residual_connection
    )


def checkpoint_residual_write(
    connection: ResidualConnection,
    branch_output: ResidualBranchOutput,
    state: ResidualConnectionState,
    context: ResidualStreamRecomputeContext,
    *,
    dropout_probability: float,
    training: bool,
) -> Tensor:
    """Checkpoint one residual write while preserving standard module hooks. Arguments and result as a write."""
    return connection._checkpoint_write(
        branch_output, state, context, dropout_probability=dropout_probability, training=training
    )


def checkpoint_residual_write_read(
    connection: ResidualConnection,
    branch_output: ResidualBranchOutput,
    state: ResidualConnectionState,
    next_read: ResidualConnection,
    norm: StreamNorm | None,
    context: ResidualStreamRecomputeContext,
    *,
    dropout_probability: float,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Checkpoint a residual write, the read of the next branch and its norm as one operation. Arguments and result as a
    write with next_read."""
    return connection._checkpoint_write_read(
        branch_output, state, next_read, norm, context, dropout_probability=dropout_probability, training=training
    )


def attach_residual_stream_recompute(
    stack: torch.nn.Module,
    config: TransformerConfig,
    *,
    atomic_layer_pairs: Sequence[tuple[int, int]] = (),
) -> None:
    """Give each of stack.layers its context around every forward of stack for which replay is active.

    Fresh managers are made per forward, so micro-batches in flight (1F1B, interleaved) never share one.
    """

    def layers_of(module: Any) -> list[Any]:
        return list(module.layers)

    block_size: int | None = getattr(config, "residual_stream_recompute_num_layers", None)

    def set_contexts(module: torch.nn.Module, *_: Any) -> None:
        if residual_stream_recompute_enabled(config, module.training):
            plan = build_residual_stream_recompute_plan(
                len(layers_of(module)),
                block_size,
                atomic_layer_pairs=atomic_layer_pairs,
            )
            for layer, context in zip(layers_of(module), plan, strict=True):
                layer.residual_stream_recompute_context = context

    def clear_contexts(module: torch.nn.Module, *_: Any) -> None:
        for layer in layers_of(module):
            layer.residual_stream_recompute_context = None

    stack.register_forward_pre_hook(set_contexts)
    stack.register_forward_hook(clear_contexts, always_call=True)
