"""Llama on wide residual streams, for `transformers`.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Travels beside config.json of an exported model. Attention, MLP, norms, rotary embedding, cache and generation are
transformers' own; only what stands between the branches is different (wide_streams.py). The weights of the branches
have the names of an ordinary Llama.

What always holds: with `output_hidden_states=True` the states between layers have K*D features, the last one has D.
"""

from typing import Any

from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .configuration_wide_llama import WideLlamaConfig
from .wide_streams import FP32_MODULES, StreamRead, StreamReadout, StreamWrite, expand, start_weights


class WideLlamaDecoderLayer(LlamaDecoderLayer):
    """A layer on a stream [b, s, K*D]; the first one takes the embedding [b, s, D] and expands it."""

    def __init__(self, config: WideLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_streams = config.num_streams
        self.is_first = layer_idx == 0
        self.residual_read_self_attn = StreamRead(config)
        self.residual_write_self_attn = StreamWrite(config)
        self.residual_read_mlp = StreamRead(config)
        self.residual_write_mlp = StreamWrite(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Arguments as LlamaDecoderLayer.forward."""
        x_bsw = expand(hidden_states, self.num_streams) if self.is_first else hidden_states
        z_bsd = self.input_layernorm(self.residual_read_self_attn(x_bsw))
        update_bsd, _ = self.self_attn(hidden_states=z_bsd, **kwargs)
        x_bsw = self.residual_write_self_attn(x_bsw, update_bsd)
        z_bsd = self.post_attention_layernorm(self.residual_read_mlp(x_bsw))
        return self.residual_write_mlp(x_bsw, self.mlp(z_bsd))


class WideLlamaModel(LlamaModel):
    """LlamaModel with such layers and a readout before its final norm."""

    config_class = WideLlamaConfig
    _keep_in_fp32_modules_strict = FP32_MODULES
    _no_split_modules = ["WideLlamaDecoderLayer"]  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: WideLlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(WideLlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.residual_stream_readout = StreamReadout(config)
        self.norm.register_forward_pre_hook(self._read_out)
        self.post_init()

    def _read_out(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.residual_stream_readout(inputs[0]),)

    def _init_weights(self, module: nn.Module) -> None:
        if not start_weights(module):
            super()._init_weights(module)


class WideLlamaForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM over WideLlamaModel."""

    config_class = WideLlamaConfig
    _keep_in_fp32_modules_strict = FP32_MODULES
    _no_split_modules = ["WideLlamaDecoderLayer"]  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: WideLlamaConfig) -> None:
        super().__init__(config)
        self.model = WideLlamaModel(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not start_weights(module):
            super()._init_weights(module)
