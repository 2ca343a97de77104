"""A hybrid stack for hosts without Transformer Engine.

    spec = ModuleSpec(module=LocalHybridStack, submodules=<layer specs of torch modules>)     # local_hybrid_specs.py

What always holds: it is upstream's stack except for the class of the final norm, whose parameters keep their names.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class LocalHybridStack(HybridStack):
    """HybridStack whose final norm is torch's. Arguments as HybridStack."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        # Upstream's constructor names Transformer Engine's norm; without post_layer_norm it builds none.
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
