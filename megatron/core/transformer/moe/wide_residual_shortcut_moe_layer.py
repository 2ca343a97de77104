"""The shortcut MoE layer on wide residual streams: three reads of a pair, one write per branch.

Built by wide hybrid stacks in place of ShortcutMoETransformerLayer. The predecessor keeps its read and its write. The
routed experts have a read of their own, of the streams before the predecessor (`residual_read_shortcut`); the shared
expert takes the MoE layer's ordinary read, of the streams after it; norm_o of their sum is written once.

What always holds: with maps untouched it computes what the ordinary shortcut layer computes; under replay the routed
read and its norm are rebuilt with the reads, norms and writes of the pair's block.

Shape suffixes: s sequence, b batch, d branch width D, w stream width K*D.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.transformer.moe.shortcut_moe_layer import ShortcutMoETransformerLayer
from megatron.core.transformer.wide_residual import StreamwiseSigmoidWideResidualRead
from megatron.core.transformer.wide_residual_branches import BranchNorm
from megatron.core.transformer.wide_residual_transformer_layer import WideResidualTransformerLayer


class WideResidualShortcutMoELayer(WideResidualTransformerLayer, ShortcutMoETransformerLayer):
    """ShortcutMoETransformerLayer on a stream of shape [s, b, K*D]. Arguments and errors as its two parents."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.residual_read_shortcut = StreamwiseSigmoidWideResidualRead(config, self.layer_number, "shortcut")
        self._take_norm("shortcut", BranchNorm(self.shortcut_layernorm))

    def _shortcut_input(self, x_sbw: Tensor) -> Tensor:
        """Return the input of the routed experts for the streams before the predecessor: [s, b, K*D] -> [s, b, D]."""
        context = self.residual_stream_recompute_context
        norm = self._norm_of("shortcut", self.residual_read_shortcut, x_sbw.dtype)
        read = partial(self.residual_read_shortcut, norm=norm)
        z_sbd = read(x_sbw) if context is None or not x_sbw.requires_grad else context.checkpoint(read, x_sbw)
        self._held.normed = None if norm is None else z_sbd
        return super()._shortcut_input(z_sbd)
