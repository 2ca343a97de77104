"""HybridModel on wide residual streams.

    model = WideResidualHybridModel(wide_config, local_hybrid_stack_spec, vocab_size, sequence_length, "M*-E")

The stack does the work (wide_residual_hybrid_stack.py); the model shows pipeline schedules the width that crosses a
stage boundary. What always holds: all base parameter names are the ordinary model's and, for one seed, so are their
initial values, bit for bit; multi-token prediction takes the readout of the stack and stays at width D.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.models.hybrid.wide_residual_hybrid_specs import widen_hybrid_stack_spec
from megatron.core.transformer.wide_residual_config import require_wide_residual_config
from megatron.core.transformer.wide_residual_pipeline import pipeline_boundary_config


class WideResidualHybridModel(HybridModel):
    """HybridModel whose stack carries K streams. Arguments as HybridModel; config carries a WideResidualConfig, and
    hybrid_stack_spec may be an ordinary stack's.

    Raises:
        ValueError: an ordinary config.
        TypeError: a stack or a layer class without a wide twin.
    """

    def __init__(self, config: TransformerConfig, hybrid_stack_spec: ModuleSpec, *args: Any, **kwargs: Any) -> None:
        require_wide_residual_config(config, type(self).__name__)
        super().__init__(config, widen_hybrid_stack_spec(hybrid_stack_spec), *args, **kwargs)
        if config.pipeline_model_parallel_size > 1:
            self.config = pipeline_boundary_config(config)
