"""Mamba-2 on wide residual streams, for `transformers`.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Travels beside config.json of an exported model. Mixers, norms, cache and generation are transformers' own; only what
stands between the mixers is different (wide_streams.py). The weights of the mixers have the names of an ordinary
Mamba-2.

What always holds: with `output_hidden_states=True` the states between layers have K*D features, the last one has D.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mamba2ForCausalLM, Mamba2Model
from transformers.models.mamba2.modeling_mamba2 import Mamba2Block

from .configuration_wide_mamba2 import WideMamba2Config
from .wide_streams import FP32_MODULES, StreamRead, StreamReadout, StreamWrite, expand, start_weights


class WideMamba2Block(Mamba2Block):
    """A layer on a stream [b, s, K*D], fp32 where the model's residual is; the first one expands the embedding."""

    def __init__(self, config: WideMamba2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_streams = config.num_streams
        self.residual_read = StreamRead(config)
        self.residual_write = StreamWrite(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Arguments as Mamba2Block.forward."""
        x_bsw = expand(hidden_states, self.num_streams) if self.layer_idx == 0 else hidden_states
        if self.residual_in_fp32:
            x_bsw = x_bsw.to(torch.float32)
        z_bsd = self.norm(self.residual_read(x_bsw, dtype=self.norm.weight.dtype))
        return self.residual_write(x_bsw, self.mixer(z_bsd, **kwargs))


class WideMamba2Model(Mamba2Model):
    """Mamba2Model with such layers and a readout before its final norm."""

    config_class = WideMamba2Config
    _keep_in_fp32_modules_strict = FP32_MODULES
    _no_split_modules = ["WideMamba2Block"]  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: WideMamba2Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(WideMamba2Block(config, index) for index in range(config.num_hidden_layers))
        self.residual_stream_readout = StreamReadout(config)
        self.norm_f.register_forward_pre_hook(self._read_out)
        self.post_init()

    def _read_out(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.residual_stream_readout(inputs[0]),)

    def _init_weights(self, module: nn.Module) -> None:
        if not start_weights(module):
            super()._init_weights(module)


class WideMamba2ForCausalLM(Mamba2ForCausalLM):
    """Mamba2ForCausalLM over WideMamba2Model."""

    config_class = WideMamba2Config
    _keep_in_fp32_modules_strict = FP32_MODULES
    _no_split_modules = ["WideMamba2Block"]  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: WideMamba2Config) -> None:
        super().__init__(config)
        self.backbone = WideMamba2Model(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not start_weights(module):
            super()._init_weights(module)
