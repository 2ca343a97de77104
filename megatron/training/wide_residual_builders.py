"""Model configs and builders that give Megatron's trainer a GPT on wide residual streams.

    model_config = gpt_model_config_from_args(args)      # ordinary without --wide-residual, wide with it
    pretrain(pretrain_cfg_container_from_args(args, model_config), ...)

What always holds: without --wide-residual the model config is upstream's own, so the run is an ordinary Megatron run.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.training.argument_utils import core_transformer_config_from_args, gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec, mtp_block_spec
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
from megatron.core.models.gpt.wide_residual_layer_specs import widen_layer_spec
from megatron.core.transformer.wide_residual_config import (
    RESIDUAL_STREAM_MODULE,
    WideResidualConfig,
    widen_transformer_config,
)
from megatron.training.model_summary import print_model_summary
from megatron.training.stream_layout import choose_block_size
from megatron.training.wide_residual_arguments import AUTO, wide_residual_config_from_args

# Fields of GPTModelConfig that GPTModel takes under the same name.
_MODEL_OPTIONS = (
    "fp16_lm_cross_entropy",
    "parallel_output",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "scatter_embedding_sequence_parallel",
    "seq_len_interpolation_factor",
)


@dataclass(kw_only=True)
class WideResidualGPTModelConfig(GPTModelConfig):
    """A GPTModelConfig whose `transformer` carries a WideResidualConfig."""

    builder: ClassVar[str] = "megatron.training.wide_residual_builders.WideResidualGPTModelBuilder"


def float16_module(config: Any, module: MegatronModule) -> MegatronModule:
    """Wrap module for bf16 or fp16 under the module's own config, which on pipeline stages has the carried width."""
    del config
    return Float16Module(get_model_config(module), module)


class WideResidualStages:
    """Mixin, left of an upstream model builder, for what building wide stages needs whatever the model."""

    _model_config: Any

    def _padded_vocab_size(self) -> int:
        config = self._model_config
        if config.vocab_size is None:
            raise ValueError("vocab_size is not set; the tokenizer, --vocab-size or --padded-vocab-size sets it")
        if not config.should_pad_vocab:
            return int(config.vocab_size)
        return calculate_padded_vocab_size(
            config.vocab_size, config.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
        )

    def _stage_options(
        self, pg_collection: Any, pre_process: bool | None, post_process: bool | None, vp_stage: int | None
    ) -> dict[str, Any]:
        """Return what a model takes about its place in the pipeline; None stands for what the groups say."""
        vp_size = self._model_config.transformer.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage, vp_size) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage, vp_size) and is_pp_last_stage(pg_collection.pp)
        return {
            "pre_process": pre_process,
            "post_process": post_process,
            "pg_collection": pg_collection,
            "vp_stage": vp_stage,
        }

    def build_distributed_models(self, *args: Any, **kwargs: Any) -> Any:
        """Build and wrap all stages of this rank. Arguments as ModelBuilder.build_distributed_models."""
        kwargs.setdefault("mixed_precision_wrapper", float16_module)
        return super().build_distributed_models(*args, **kwargs)  # type: ignore[misc]


class WideResidualGPTModelBuilder(WideResidualStages, GPTModelBuilder):
    """Builds WideResidualGPTModel stages; distributed wrapping is the parent's."""

    def _layer_spec(self, vp_stage: int | None) -> Any:
        """Return the wide twin of the layer spec that the ordinary model would have."""
        config = self._model_config
        spec: Any = config.transformer_layer_spec or default_layer_spec
        # A ModuleSpec can be called too, so what it is decides.
        if not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
            stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec).parameters else {}
            spec = spec(config, **stage)
        if config.attention_backend == AttnBackend.local and isinstance(spec, ModuleSpec):
            spec.submodules.self_attention.submodules.core_attention = DotProductAttention
        return widen_layer_spec(spec)

    def build_model(
        self, pg_collection: Any, pre_process: Any = None, post_process: Any = None, vp_stage: Any = None
    ) -> Any:
        """Build one stage. Arguments as GPTModelBuilder.build_model."""
        config = self._model_config
        layer_spec = self._layer_spec(vp_stage)
        return WideResidualGPTModel(
            config.transformer,
            layer_spec,
            self._padded_vocab_size(),
            config.seq_length,
            mtp_block_spec=mtp_block_spec(config, layer_spec, vp_stage=vp_stage),
            **self._stage_options(pg_collection, pre_process, post_process, vp_stage),
            **{option: getattr(config, option) for option in _MODEL_OPTIONS},
        )


def _best_block_size(args: Namespace, config: TransformerConfig) -> int:
    """Choose the replay block of the least memory, and say so on rank 0."""
    best = choose_block_size(args, config, args.wide_residual)
    if args.rank == 0:
        print(
            f"> replay: blocks of {best} layers hold the least (--residual-stream-recompute-num-layers auto)",
            flush=True,
        )
    return best


def wide_transformer_config_from_args(args: Namespace, wide_residual: WideResidualConfig) -> Any:
    """Return the transformer config that carries the streams, for Megatron's parsed arguments."""
    modules = args.recompute_modules
    replays = RESIDUAL_STREAM_MODULE in (modules or ())
    if replays:  # Megatron refuses recompute modules that are not its own
        args = Namespace(**{**vars(args), "recompute_modules": [m for m in modules if m != RESIDUAL_STREAM_MODULE]})
    config = core_transformer_config_from_args(args)
    block_size = args.residual_stream_recompute_num_layers
    if block_size == AUTO:
        block_size = _best_block_size(args, config)
    return widen_transformer_config(
        config,
        wide_residual,
        recompute_residual_stream=replays,
        residual_stream_recompute_num_layers=block_size,
    )


def gpt_model_config_from_args(args: Namespace) -> GPTModelConfig:
    """Return the model config for Megatron's parsed arguments: upstream's own, or the wide one with --wide-residual."""
    wide_residual = wide_residual_config_from_args(args)
    if wide_residual is None:
        model_config = gpt_config_from_args(args)
    else:
        model_config = gpt_config_from_args(
            args,
            config=wide_transformer_config_from_args(args, wide_residual),
            model_config_cls=WideResidualGPTModelConfig,
        )
    model_config.pre_wrap_hooks.append(print_model_summary)
    return model_config
