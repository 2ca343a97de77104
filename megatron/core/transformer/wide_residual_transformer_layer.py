"""A Transformer layer, dense or MoE, whose attention and MLP branches read from and write to wide residual streams.

Used through a layer spec: `ModuleSpec(module=WideResidualTransformerLayer, submodules=<those of the ordinary layer>)`.
A layer with one of the two branches only, as hybrid stacks have them, works the same.

What always holds: upstream's forward runs, not a copy of it. Each half-layer first reads the branch input z (width D)
from the stream, hands z to the parent, and puts its write where the parent calls the bias-dropout-add. Parameter names
of the ordinary layer are unchanged, and building the layer draws no random numbers beyond the ordinary layer's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron.core.transformer.wide_residual_branches import BranchNorm, WideResidualBranches
from megatron.core.transformer.wide_residual_config import require_wide_residual_config


class WideResidualTransformerLayer(WideResidualBranches, TransformerLayer):
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
        branches = (("self_attn", self.self_attention), ("mlp", self.mlp))
        self._add_branches(
            [branch for branch, module in branches if not isinstance(module, IdentityOp)],
            norms={
                "self_attn": BranchNorm(
                    self.input_layernorm, self.recompute_input_layernorm, offloaded=self.offload_attn_norm
                ),
                "mlp": BranchNorm(
                    self.pre_mlp_layernorm, self.recompute_pre_mlp_layernorm, offloaded=self.offload_mlp_norm
                ),
            },
            pg_collection=self.pg_collection,
            name=kwargs.get("name"),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer: [s, b, K*D] -> ([s, b, K*D], context). Arguments as TransformerLayer.forward.

        The attention's write reads the MLP's input in the same pass, unless upstream puts activations of the attention
        on the host between the two.
        """
        with nullcontext() if self.offload_attn_norm else self._reading_ahead():
            return super().forward(*args, **kwargs)

    def _forward_attention(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the attention half-layer: [s, b, K*D] -> ([s, b, K*D], context)."""
        return self._run_branch("self_attn", super()._forward_attention, hidden_states, *args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the MLP or MoE half-layer: [s, b, K*D] -> [s, b, K*D]."""
        return self._run_branch("mlp", super()._forward_mlp, hidden_states, *args, **kwargs)
