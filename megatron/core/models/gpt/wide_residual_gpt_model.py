"""GPTModel on wide residual streams.

    model = WideResidualGPTModel(wide_config, get_gpt_wide_residual_layer_local_spec(), vocab_size, sequence_length)

The first pipeline stage repeats the embedding K times, layers carry [s, b, K*D], the stage with the final norm reads
the streams out to width D before it. What always holds: upstream's forward runs, not a copy of it; all base parameter
names are the ordinary model's and, for one seed, so are their initial values, bit for bit.

Shape suffixes: s sequence, b batch, d branch width D, w stream width K*D.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import WrappedTensor
from torch import Tensor

from megatron.core.transformer.residual_read_ahead import attach_read_ahead
from megatron.core.transformer.residual_recompute import attach_residual_stream_recompute
from megatron.core.transformer.wide_residual import build_wide_residual_readout, expand_wide_residual_stream
from megatron.core.transformer.wide_residual_config import require_wide_residual_config
from megatron.core.transformer.wide_residual_pipeline import pipeline_boundary_config
from megatron.core.transformer.wide_residual_transformer_layer import WideResidualTransformerLayer


def _check_layer_specs(spec: ModuleSpec | TransformerBlockSubmodules) -> None:
    """Raise TypeError for a spec with a layer class that knows one residual stream only."""
    layer_specs = spec.layer_specs or [] if isinstance(spec, TransformerBlockSubmodules) else [spec]
    for layer_spec in layer_specs:
        module = layer_spec.module
        if not (isinstance(module, type) and issubclass(module, WideResidualTransformerLayer)):
            raise TypeError(
                f"the layer class {getattr(module, '__name__', module)} knows one residual stream only, the config "
                "carries wide ones; WideResidualTransformerLayer is wanted (widen_layer_spec makes such a spec)"
            )


class WideResidualGPTModel(GPTModel):
    """GPTModel whose decoder carries K streams. Arguments as GPTModel; config carries a WideResidualConfig.

    Raises:
        ValueError: an ordinary config.
        TypeError: a layer class that knows one residual stream only.
    """

    def __init__(self, config: TransformerConfig, transformer_layer_spec: Any, *args: Any, **kwargs: Any) -> None:
        wide_residual = require_wide_residual_config(config, type(self).__name__)
        _check_layer_specs(transformer_layer_spec)
        super().__init__(config, transformer_layer_spec, *args, **kwargs)
        self.num_streams = wide_residual.num_streams
        if self.decoder.final_layernorm is not None:
            self.decoder.residual_stream_readout = build_wide_residual_readout(config)
            self.decoder.final_layernorm.register_forward_pre_hook(self._read_out)
        attach_residual_stream_recompute(self.decoder, config)
        attach_read_ahead(self.decoder, config)
        if config.pipeline_model_parallel_size > 1:
            self.config = pipeline_boundary_config(config)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Embed as the ordinary model does, then expand to K streams on the first stage."""
        embedded, *rest = super()._preprocess(*args, **kwargs)
        if isinstance(embedded, WrappedTensor):
            embedded = WrappedTensor(expand_wide_residual_stream(embedded.unwrap(), self.num_streams))
        elif embedded is not None:
            embedded = expand_wide_residual_stream(embedded, self.num_streams)
        return (embedded, *rest)

    def _read_out(self, norm: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the final norm the readout [s, b, D] of the streams [s, b, K*D] that reach it."""
        del norm
        x_sbw, *rest = inputs
        return (self.decoder.residual_stream_readout(x_sbw), *rest)
