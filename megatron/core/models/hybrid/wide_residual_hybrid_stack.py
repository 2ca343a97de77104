"""Hybrid stacks of Mamba, attention, MLP and MoE layers on wide residual streams.

    spec = ModuleSpec(module=WideResidualHybridStack, submodules=hybrid_stack_spec.submodules)

The stack of the first pipeline stage repeats its input K times, layers carry [s, b, K*D], and the stack with the final
norm reads the streams out to width D before it. It takes the layer specs of an ordinary stack and widens them itself,
so that the same submodules serve the multi-token prediction stacks, which stay at width D.

What always holds: upstream's forward runs; base parameters keep the ordinary stack's names.

Shape suffixes: s sequence, b batch, d branch width D, w stream width K*D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from megatron.core.utils import WrappedTensor
from torch import Tensor

from megatron.core.models.hybrid.local_hybrid_stack import LocalHybridStack
from megatron.core.ssm.wide_residual_mamba_layer import WideResidualMambaLayer
from megatron.core.transformer.moe.shortcut_moe_layer import ShortcutMoETransformerLayer
from megatron.core.transformer.moe.wide_residual_shortcut_moe_layer import WideResidualShortcutMoELayer
from megatron.core.transformer.residual_read_ahead import attach_read_ahead
from megatron.core.transformer.residual_recompute import attach_residual_stream_recompute
from megatron.core.transformer.wide_residual import build_wide_residual_readout, expand_wide_residual_stream
from megatron.core.transformer.wide_residual_branches import WideResidualBranches
from megatron.core.transformer.wide_residual_config import require_wide_residual_config
from megatron.core.transformer.wide_residual_transformer_layer import WideResidualTransformerLayer

# An MLP layer and an MoE layer are Transformer layers without attention; what their own classes add is CUDA graphs,
# which wide streams refuse.
_WIDE_LAYER: dict[type, type] = {
    MambaLayer: WideResidualMambaLayer,
    TransformerLayer: WideResidualTransformerLayer,
    MLPLayer: WideResidualTransformerLayer,
    MoETransformerLayer: WideResidualTransformerLayer,
    ShortcutMoETransformerLayer: WideResidualShortcutMoELayer,
}


def widen_hybrid_submodules(submodules: HybridStackSubmodules) -> HybridStackSubmodules:
    """Return submodules with the wide twin of every layer class; submodules is left as it was.

    Raises:
        TypeError: a layer class without a wide twin; the message names it.
    """
    wide = {}
    for field in fields(submodules):
        spec = getattr(submodules, field.name)
        if field.name == "mtp_block_spec" or spec is IdentityOp:
            continue
        module = spec.module if isinstance(spec, ModuleSpec) else spec
        if isinstance(module, type) and issubclass(module, WideResidualBranches):
            continue
        if module not in _WIDE_LAYER:
            raise TypeError(
                f"{field.name}: the layer class {getattr(module, '__name__', module)} has no twin on wide residual "
                f"streams; there are twins of {', '.join(known.__name__ for known in _WIDE_LAYER)}"
            )
        wide[field.name] = replace(spec, module=_WIDE_LAYER[module])
    return replace(submodules, **wide)


class _WideResidualStack:
    """Mixin, left of a hybrid stack, that carries K streams between its layers."""

    @property
    def atomic_layer_pairs(self) -> Sequence[tuple[int, int]]:
        """Local indices of layers that a replay block must not split: shortcut_hybrid_stack.py has some."""
        return ()

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, *args: Any, **kwargs: Any) -> None:
        wide_residual = require_wide_residual_config(config, type(self).__name__)
        super().__init__(config, widen_hybrid_submodules(submodules), *args, **kwargs)  # type: ignore[call-arg]
        self.num_streams = wide_residual.num_streams
        if hasattr(self, "final_norm"):
            self.residual_stream_readout = build_wide_residual_readout(config)
            self.final_norm.register_forward_pre_hook(self._read_out)
        attach_residual_stream_recompute(self, config, atomic_layer_pairs=self.atomic_layer_pairs)  # type: ignore[arg-type]
        if not self.atomic_layer_pairs:  # a pair's MoE layer reads what its predecessor was given
            attach_read_ahead(self, config)  # type: ignore[arg-type]

    def _read_out(self, norm: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the final norm the readout [s, b, D] of the streams [s, b, K*D] that reach it."""
        del norm
        x_sbw, *rest = inputs
        return (self.residual_stream_readout(x_sbw), *rest)  # type: ignore[misc]

    def forward(self, hidden_states: Tensor | WrappedTensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stack. Arguments as HybridStack.forward; hidden_states is [s, b, D] on the first stage."""
        if self.pre_process:  # type: ignore[attr-defined]
            embedded = hidden_states.unwrap() if isinstance(hidden_states, WrappedTensor) else hidden_states
            hidden_states = expand_wide_residual_stream(embedded, self.num_streams)
        y: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return y


class WideResidualHybridStack(_WideResidualStack, HybridStack):
    """HybridStack on wide residual streams. Arguments as HybridStack, submodules those of the ordinary stack.

    Raises:
        ValueError: an ordinary config.
        TypeError: a layer class without a wide twin.
    """


class WideResidualLocalHybridStack(_WideResidualStack, LocalHybridStack):
    """The same for hosts without Transformer Engine."""
