"""Model configs and builders that give Megatron's trainer a hybrid model, ordinary or on wide residual streams.

    model_config = hybrid_model_config_from_args(args)   # ordinary without --wide-residual, wide with it
    pretrain(pretrain_cfg_container_from_args(args, model_config), ...)

What always holds: with Transformer Engine and without --wide-residual the model config is upstream's own; without
Transformer Engine the stack is the local one, whose parameters are upstream's (local_hybrid_specs.py).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig

from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec, with_query_key_norms
from megatron.core.models.hybrid.wide_residual_hybrid_model import WideResidualHybridModel
from megatron.training.model_summary import print_model_summary
from megatron.training.shortcut_moe_arguments import shortcut_stack_spec
from megatron.training.wide_residual_arguments import wide_residual_config_from_args
from megatron.training.wide_residual_builders import WideResidualStages, wide_transformer_config_from_args

# Fields of HybridModelConfig that HybridModel takes under the same name.
_MODEL_OPTIONS = (
    "hybrid_layer_pattern",
    "fp16_lm_cross_entropy",
    "parallel_output",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "seq_len_interpolation_factor",
)


@dataclass(kw_only=True)
class WideResidualHybridModelConfig(HybridModelConfig):
    """A HybridModelConfig whose `transformer` carries a WideResidualConfig."""

    builder: ClassVar[str] = "megatron.training.hybrid_builders.WideResidualHybridModelBuilder"


class WideResidualHybridModelBuilder(WideResidualStages, HybridModelBuilder):
    """Builds WideResidualHybridModel stages; distributed wrapping is the parent's."""

    def build_model(
        self, pg_collection: Any, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None
    ) -> Any:
        """Build one stage. Arguments as HybridModelBuilder.build_model."""
        config = self._model_config
        return WideResidualHybridModel(
            config.transformer,
            config.hybrid_stack_spec or hybrid_stack_spec,
            self._padded_vocab_size(),
            config.seq_length,
            **self._stage_options(pg_collection, pre_process, post_process, vp_stage),
            **{option: getattr(config, option) for option in _MODEL_OPTIONS},
        )


def hybrid_model_config_from_args(args: Namespace) -> HybridModelConfig:
    """Return the model config for Megatron's parsed arguments: upstream's own, or the wide one with --wide-residual."""
    wide_residual = wide_residual_config_from_args(args)
    if wide_residual is None:
        model_config = hybrid_config_from_args(args)
    else:
        model_config = hybrid_config_from_args(
            args,
            config=wide_transformer_config_from_args(args, wide_residual),
            model_config_cls=WideResidualHybridModelConfig,
        )
    if model_config.hybrid_stack_spec is None and args.transformer_impl == "local":
        normed = model_config.transformer.qk_layernorm
        model_config.hybrid_stack_spec = (
            with_query_key_norms(local_hybrid_stack_spec) if normed else local_hybrid_stack_spec
        )
    if args.moe_shortcut_connection:
        model_config.hybrid_stack_spec = shortcut_stack_spec(args, model_config.hybrid_stack_spec or hybrid_stack_spec)
    model_config.pre_wrap_hooks.append(print_model_summary)
    return model_config
