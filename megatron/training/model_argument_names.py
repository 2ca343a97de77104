"""Which arguments describe a model or its tokenizer, and not how a run computes.

    names = model_argument_names(parser)

The groups of flags that describe models, but for those in `_OF_THE_RUN`: what a checkpoint's model computes is said by
these, whether or not they change the shape of a weight.
"""

from __future__ import annotations

import argparse
import dataclasses

from megatron.core.model_parallel_config import ModelParallelConfig

# Groups of upstream's parser, and ours, whose flags describe a model or its tokenizer.
_MODEL_GROUPS = (
    "transformer configuration",
    "network size",
    "moe",
    "mla",
    "experimental_attention_variant",
    "heterogeneous architecture",
    "tokenizer",
    "wide residual streams",
    "shortcut MoE",
)
# Flags of other groups that do.
_MODEL_FLAGS = (
    *("seq_length", "rope_type", "spec", "hybrid_layer_pattern", "hybrid_override_pattern", "enable_experimental"),
    *("attention_softmax_in_fp32", "fp16", "bf16"),
)
# Prefixes and names of flags of those groups that say how a run computes, not what.
_OF_THE_RUN_PREFIXES = (
    *("recompute_", "cuda_graph_", "inference_", "fp8", "fp4", "offload_", "fine_grained_", "moe_permute_fusion"),
    *(
        "moe_deepep_",
        "moe_hybridep_",
        "moe_ncclep_",
        "moe_flex_",
        "moe_paged_stash",
        "moe_single_grouped_",
        "mtp_stand",
    ),
    *(
        "residual_stream_recompute",
        "activation_offload",
        "min_offloaded",
        "delay_offload",
        "delta_offload",
        "symmetric_",
    ),
)
_OF_THE_RUN = {
    *("transformer_impl", "attention_backend", "flash_attention_version", "flash_decode", "batch_invariant_mode"),
    *("enable_cuda_graph", "external_cuda_graph", "config_logger_dir", "init_model_with_meta_device"),
    *("distribute_saved_activations", "encoder_num_layers", "decoder_num_layers", "calculate_per_token_loss"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "high_priority_a2a_comm_stream"),
    *("masked_softmax_fusion", "fused_residual_rmsnorm", "use_fused_weighted_squared_relu", "use_te_activation_func"),
    *("use_transformer_engine_op_fuser", "use_mamba_mem_eff_path", "nccl_all_reduce_for_prefill", "onnx_safe"),
    *("moe_enable_deepep", "moe_grouped_gemm", "moe_layer_recompute", "moe_router_fusion", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "moe_per_layer_logging", "moe_enable_routing_replay", "moe_use_upcycling"),
    "moe_shortcut_parallel",
    *("moe_expert_rank_capacity_factor", "use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"),
    *("mlp_chunks_for_prefill", "mlp_chunks_for_training", "mla_down_proj_fusion", "cache_mla_latents"),
    *("is_hybrid_model", "use_kitchen_attention", "kitchen_attention_backend", "qk_clip", "first_last_layers_bf16"),
    *("moe_router_force_load_balancing", "moe_router_force_biased", "moe_input_jitter_eps", "dsa_kernel_backend"),
}


def model_argument_names(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names, in the namespace, of the arguments that describe a model or its tokenizer."""
    layout = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    names = {
        action.dest
        for group in parser._action_groups
        if group.title in _MODEL_GROUPS
        for action in group._group_actions
        if action.dest not in layout | _OF_THE_RUN and not action.dest.startswith(_OF_THE_RUN_PREFIXES)
    }
    return names | set(_MODEL_FLAGS)
