"""Specs of ordinary hybrid stacks for hosts without Transformer Engine: torch norms, Megatron's own linear layers.

    HybridModel(config, local_hybrid_stack_spec, vocab_size, sequence_length, hybrid_layer_pattern="M*-E")

What always holds: the model has the parameters of upstream's `hybrid_stack_spec`, under the same names but for the
norms that Transformer Engine fuses into the linear layer after them: FUSED_NORM_KEYS is the whole difference. Sharded
(torch_dist) checkpoints store the fused names, so they load into either model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import megatron.core.transformer.multi_token_prediction as mtp
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron.core.models.hybrid.local_hybrid_stack import LocalHybridStack

FUSED_NORM_KEYS = {
    "mamba_layer": ("norm.", "mixer.in_proj.layer_norm_"),
    "attention_layer": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "mlp_layer": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
}
"""Kind of layer -> (prefix of a norm's parameters here, prefix in the Transformer Engine model)."""

_NUM_EXPERTS = 8  # the spec needs to know that there are experts; the config says how many


def _fused(kind: str) -> dict[str, str]:
    local, fused = FUSED_NORM_KEYS[kind]
    return {local: fused}


_MAMBA_LAYER = ModuleSpec(
    module=MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        ),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_fused("mamba_layer"),
    ),
)

_ATTENTION_LAYER = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_fused("attention_layer"),
    ),
)

_MLP_LAYER = ModuleSpec(
    module=MLPLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(
            MLP.as_mlp_submodule,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=_fused("mlp_layer"),
    ),
)

_MOE_LAYER = ModuleSpec(
    module=MoETransformerLayer,
    submodules=TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=_NUM_EXPERTS, moe_grouped_gemm=False),
        mlp_bda=get_bias_dropout_add,
    ),
)

# The layers of a prediction depth are those of its pattern; this adds the norms and the projection around them.
_PREDICTION_DEPTH = mtp.MultiTokenPredictionLayerSubmodules(
    **dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm), eh_proj=ColumnParallelLinear
)
_MTP_BLOCK = ModuleSpec(
    module=mtp.MultiTokenPredictionBlock,
    submodules=mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=_PREDICTION_DEPTH)]
    ),
)

local_hybrid_stack_spec = ModuleSpec(
    module=LocalHybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=_MAMBA_LAYER,
        attention_layer=_ATTENTION_LAYER,
        mlp_layer=_MLP_LAYER,
        moe_layer=_MOE_LAYER,
        mtp_block_spec=_MTP_BLOCK,
    ),
)
"""Mamba-2, attention, MLP and MoE layers. GDN and MLA layers need Transformer Engine and fla."""


def with_query_key_norms(spec: ModuleSpec) -> ModuleSpec:
    """Return spec, one of torch modules, for a config with `qk_layernorm`; spec is left as it was.

    Its attention layers norm queries and keys with torch's norm. Transformer Engine's need no such spec: upstream takes
    that package's norm of itself.
    """
    layer = spec.submodules.attention_layer
    attention = layer.submodules.self_attention
    norms = dict.fromkeys(("q_layernorm", "k_layernorm"), WrappedTorchNorm)
    attention = replace(attention, submodules=replace(attention.submodules, **norms))
    layer = replace(layer, submodules=replace(layer.submodules, self_attention=attention))
    return replace(spec, submodules=replace(spec.submodules, attention_layer=layer))
