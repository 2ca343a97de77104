"""Layer specs of GPT models with wide residual streams: the ordinary specs with the layer class exchanged.

    spec = get_gpt_wide_residual_layer_local_spec(normalization="RMSNorm")
    spec = widen_layer_spec(any_ordinary_spec)

What always holds: only the layer class differs. Attention, MLP, MoE and norms are those of the ordinary spec, so every
backend (local, Transformer Engine) and every submodule option of megatron-core carries over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.core.transformer.wide_residual_transformer_layer import WideResidualTransformerLayer


def widen_layer_spec(spec: ModuleSpec | TransformerBlockSubmodules) -> Any:
    """Return spec with WideResidualTransformerLayer in place of every TransformerLayer; spec is left as it was.

    Raises:
        TypeError: a layer class that has no wide twin; the message names it.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return replace(spec, layer_specs=[widen_layer_spec(layer_spec) for layer_spec in spec.layer_specs or []])
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"a {type(spec).__name__} is no layer spec; wanted: ModuleSpec or TransformerBlockSubmodules")
    module = spec.module
    if isinstance(module, type) and issubclass(module, WideResidualTransformerLayer):
        return spec
    if module is not TransformerLayer:
        raise TypeError(
            f"the layer class {getattr(module, '__name__', module)} has no twin on wide residual streams; a spec of "
            "TransformerLayer is wanted"
        )
    return replace(spec, module=WideResidualTransformerLayer)


def get_gpt_wide_residual_layer_local_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the wide twin of `get_gpt_layer_local_spec`, whose arguments it takes."""
    return widen_layer_spec(get_gpt_layer_local_spec(*args, **kwargs))


def get_gpt_wide_residual_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the wide twin of `get_gpt_layer_with_transformer_engine_spec`, whose arguments it takes."""
    return widen_layer_spec(get_gpt_layer_with_transformer_engine_spec(*args, **kwargs))
