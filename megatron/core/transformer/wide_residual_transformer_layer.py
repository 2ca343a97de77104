"""A Transformer layer, dense or MoE, whose attention and MLP branches read from and write to wide residual streams.

Used through a layer spec: `ModuleSpec(module=WideResidualTransformerLayer, submodules=<those of the ordinary layer>)`.

What always holds: upstream's forward runs, not a copy of it. Each half-layer first reads the branch input z (width D)
from the stream, hands z to the parent, and puts its write where the parent calls the bias-dropout-add. Parameter names
of the ordinary layer are unchanged, and building the layer draws no random numbers beyond the ordinary layer's.

Shape suffixes: s sequence, b batch, d branch width D, w stream width K*D.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron.core.transformer.residual_connection import ResidualBranchOutput, ResidualConnectionState
from megatron.core.transformer.residual_recompute import (
    ResidualStreamRecomputeContext,
    checkpoint_residual_read,
    checkpoint_residual_write,
)
from megatron.core.transformer.wide_residual import StreamwiseSigmoidWideResidualConnection, load_residual_state
from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE, require_wide_residual_config


class WideResidualTransformerLayer(TransformerLayer):
    """TransformerLayer on a stream of shape [s, b, K*D]; its branches compute at width D.

    Arguments as TransformerLayer.

    Raises:
        ValueError: an ordinary config, or submodules with cross-attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        require_wide_residual_config(config, type(self).__name__)
        if submodules.cross_attention is not IdentityOp:
            raise ValueError(
                "cross-attention (an encoder-decoder layer spec) cannot be used with wide residual streams: there is "
                "no read and write for it. Use a decoder-only spec, or leave --wide-residual out."
            )
        super().__init__(
            config,
            submodules,
            layer_number=layer_number,
            hidden_dropout=hidden_dropout,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **kwargs,
        )
        self._carried: dict[str, ResidualConnectionState] = {}
        self.residual_stream_recompute_context: ResidualStreamRecomputeContext | None = None
        self._branches = tuple(
            branch
            for branch, module in (("self_attn", self.self_attention), ("mlp", self.mlp))
            if not isinstance(module, IdentityOp)
        )
        for branch in self._branches:
            self._add_connections(branch, kwargs.get("name"))
        self._add_norm_replay()
        self.register_load_state_dict_pre_hook(load_residual_state)
        # The parent enables gradients around the bias-dropout-add even in evaluation. A write saves tensors for its
        # backward, so it follows the caller's grad mode instead.
        self.bias_dropout_add_exec_handler = nullcontext

    def _add_connections(self, branch: str, name: str | None) -> None:
        """Build the read and the write of a branch, and put the write where the bias-dropout-add stood."""
        for operation in ("read", "write"):
            attribute = f"residual_{operation}_{branch}"
            connection = StreamwiseSigmoidWideResidualConnection(
                self.config,
                self.layer_number,
                branch,
                self.pg_collection,
                f"{name}.{attribute}" if name is not None else None,
                operation=operation,
            )
            setattr(self, attribute, connection)
        # Bound methods, not closures: a deep copy of the layer then writes to its own maps.
        delattr(self, f"{branch}_bda")
        setattr(self, f"{branch}_bda", partial(self._bias_dropout_write, branch))

    def _bias_dropout_write(
        self, branch: str, training: bool, fused: bool
    ) -> Callable[[ResidualBranchOutput, Tensor, float], Tensor]:
        """Stand in for get_bias_dropout_add, whose `fused` has no meaning for a write."""
        del fused
        return partial(self._write, branch, training)

    def _add_norm_replay(self) -> None:
        """Let the norms that reads feed join the replay, where the parent does not recompute them itself."""
        if RESIDUAL_STREAM_MODULE not in (self.config.recompute_modules or ()):
            return
        for norm, recomputed_by_parent in (
            (self.input_layernorm, self.recompute_input_layernorm),
            (self.pre_mlp_layernorm, self.recompute_pre_mlp_layernorm),
        ):
            if not isinstance(norm, IdentityOp) and not recomputed_by_parent:
                norm.forward = partial(self._normalize, norm.forward)

    def _normalize(self, norm: Callable[..., Any], z_sbd: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a norm, under replay where it is active and z has a gradient to pass on."""
        context = self.residual_stream_recompute_context
        if context is None or not z_sbd.requires_grad:
            return norm(z_sbd, *args, **kwargs)
        return context.checkpoint(partial(norm, **kwargs), z_sbd, *args)

    def _read(self, branch: str, x_sbw: Tensor) -> Tensor:
        """Read the branch input from the stream and keep the stream for the write."""
        read = getattr(self, f"residual_read_{branch}")
        fp32_residual = bool(self.config.fp32_residual_connection)
        context = self.residual_stream_recompute_context
        if context is None:
            z_sbd, state = read(x_sbw, fp32_residual_connection=fp32_residual)
        else:
            z_sbd, state = checkpoint_residual_read(read, x_sbw, context, fp32_residual_connection=fp32_residual)
        self._carried[branch] = state
        return z_sbd

    def _write(
        self,
        branch: str,
        training: bool,
        branch_output: ResidualBranchOutput,
        z_sbd: Tensor,
        dropout_probability: float,
    ) -> Tensor:
        """Write the branch output into the stream that its read kept; the parent's residual, z, is not needed.

        The last write of a replay block is its live boundary: it stays in ordinary autograd and ends the block.
        """
        del z_sbd
        write = getattr(self, f"residual_write_{branch}")
        state = self._carried.pop(branch)
        options: dict[str, Any] = {"dropout_probability": dropout_probability, "training": training}
        context = self.residual_stream_recompute_context
        ends_block = context is not None and context.is_block_end and branch == self._branches[-1]
        if context is not None and not ends_block:
            return checkpoint_residual_write(write, branch_output, state, context, **options)
        y_sbw = write(branch_output=branch_output, state=state, **options)
        if context is not None:
            context.finalize(y_sbw)
        return y_sbw

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the attention half-layer: [s, b, K*D] -> ([s, b, K*D], context)."""
        return self._run_branch("self_attn", super()._forward_attention, hidden_states, *args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the MLP or MoE half-layer: [s, b, K*D] -> [s, b, K*D]."""
        return self._run_branch("mlp", super()._forward_mlp, hidden_states, *args, **kwargs)

    def _run_branch(self, branch: str, run_parent: Callable[..., Any], x_sbw: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read, run the parent's half-layer on the branch input, and leave nothing behind."""
        if branch not in self._branches:
            return run_parent(x_sbw, *args, **kwargs)
        try:
            return run_parent(self._read(branch, x_sbw), *args, **kwargs)
        finally:
            self._carried.pop(branch, None)
