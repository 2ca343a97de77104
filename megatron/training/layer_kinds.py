"""The layers of every model chunk by kind, for a GPT and for a hybrid: what a memory report builds and counts.

    stage_kinds(args, config)       # [stage][chunk]: ("dense", "moe", ...) of a GPT, ("M", "*", "-", "*E") of a hybrid

A kind is what can be built alone. In a GPT it is one layer, "dense" or "moe"; in a hybrid a symbol of the pattern, or
with shortcut MoE the two symbols of a pair. What always holds: the kinds of a chunk, in order, are its layers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.models.hybrid.shortcut_pairs import MOE_SYMBOL, shortcut_pairs
from megatron.training.hybrid_patterns import pipeline_segments

DENSE, MOE = "dense", "moe"
_MAMBA = "M"


def is_hybrid(args: Namespace) -> bool:
    """Whether validated arguments describe a hybrid."""
    return args.hybrid_layer_pattern is not None


def layers_in(kind: str) -> int:
    """Return the layers of a kind."""
    return 1 if kind in (DENSE, MOE) else len(kind)


def is_pair(kind: str) -> bool:
    """Whether a kind is a pair of shortcut MoE, whose three reads feed two branches."""
    return layers_in(kind) == 2


def has_attention(kind: str) -> bool:
    """Whether a kind has attention, which layers share a mask and rotary angles for."""
    return kind in (DENSE, MOE) or "*" in kind


def mamba_layers(kind: str) -> int:
    """Return how many layers of a kind are Mamba layers: those cast the stream before they norm it."""
    return kind.count(_MAMBA)


def writes_bias(kind: str) -> bool:
    """Whether updates of a kind have a bias where linear layers have one: Mamba layers and local experts have none."""
    return kind != MOE and not set(kind) <= {_MAMBA, MOE_SYMBOL}


def pairs_of(kinds: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the local layer indices of the pairs among the kinds of a chunk."""
    pairs, start = [], 0
    for kind in kinds:
        if is_pair(kind):
            pairs.append((start, start + 1))
        start += layers_in(kind)
    return tuple(pairs)


def _gpt_kinds(args: Namespace) -> list[str]:
    """Return the kind of every layer of a GPT: which ones have experts."""
    if args.num_experts is None:
        return [DENSE] * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [DENSE if layer % frequency else MOE for layer in range(args.num_layers)]
    return [MOE if has_experts else DENSE for has_experts in frequency]


def _gpt_chunk_layers(config: TransformerConfig) -> list[list[int]]:
    """Return the number of layers of every model chunk of a GPT: [stage][chunk]."""
    chunks = config.virtual_pipeline_model_parallel_size
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    return [
        [
            get_num_layers_to_build(config, vp_stage=chunk if chunks else None, pp_rank=stage)
            for chunk in range(chunks or 1)
        ]
        for stage in range(config.pipeline_model_parallel_size)
    ]


def _gpt_stages(args: Namespace, config: TransformerConfig) -> list[list[tuple[str, ...]]]:
    """Deal the layers of a GPT out: they run through chunk 0 of all stages, then chunk 1, ..."""
    kinds, start = _gpt_kinds(args), 0
    layers = _gpt_chunk_layers(config)
    stages: list[list[tuple[str, ...]]] = [[] for _ in layers]
    for chunk in range(len(layers[0])):
        for stage, stage_layers in enumerate(layers):
            stages[stage].append(tuple(kinds[start : start + stage_layers[chunk]]))
            start += stage_layers[chunk]
    return stages


def _segment_kinds(segment: str, shortcut: bool) -> tuple[str, ...]:
    """Return the kinds of a pipeline segment of a pattern."""
    seconds = {second for _, second in shortcut_pairs(segment)} if shortcut else set()
    kinds: list[str] = []
    for index, symbol in enumerate(segment):
        if index in seconds:
            kinds[-1] += symbol
        else:
            kinds.append(symbol)
    return tuple(kinds)


def _hybrid_stages(args: Namespace, config: TransformerConfig) -> list[list[tuple[str, ...]]]:
    """Deal the segments of a hybrid's pattern out; prediction depths are left out."""
    stages = config.pipeline_model_parallel_size
    ends = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    shortcut = bool(args.moe_shortcut_connection)
    segments = pipeline_segments(args.hybrid_layer_pattern, stages, *ends)
    kinds = [_segment_kinds(segment, shortcut) for _, segment in segments]
    return [kinds[stage::stages] for stage in range(stages)]


def stage_kinds(args: Namespace, config: TransformerConfig) -> list[list[tuple[str, ...]]]:
    """Return the kinds of every model chunk of every pipeline stage, for validated arguments and their config."""
    return _hybrid_stages(args, config) if is_hybrid(args) else _gpt_stages(args, config)
