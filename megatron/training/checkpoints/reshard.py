"""Another layout (TP, PP, EP) or format of the same checkpoint.

    plan_reshard(reader, Layout(tensor=2, pipeline=2), "torch")

What always holds: every weight and optimizer state keeps its bits; the embedding's padding rows, which no token uses,
are added as zeros or left out where the layout's padded vocabulary needs it. Random number states belong to their ranks
and go with the layout; what they were is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import Common, Entry, TensorInfo
from megatron.training.checkpoints.conversion import Plan, Step, copy_step, ordered, refuse_buckets, weights_only
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import model_sizes
from megatron.training.checkpoints.open_checkpoint import Reader
from megatron.training.checkpoints.optimizer_chain import parts_of, rechained
from megatron.training.checkpoints.plain_ranks import even_stages
from megatron.training.checkpoints.sharded_style import ShardedStyle, hybrid_pattern
from megatron.training.checkpoints.tensor_table import find_tensor
from megatron.training.checkpoints.widen import style_of

_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What upstream says of how it spells keys; ShardedStyle spells them so."""

_VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def padded_vocabulary(common: Common, tensor_ranks: int) -> int | None:
    """Return the rows of the embedding on so many tensor-parallel ranks; None when the arguments do not tell."""
    vocabulary = getattr(common.args, "vocab_size", None)
    multiple = getattr(common.args, "make_vocab_size_divisible_by", None)
    stored = getattr(common.args, "padded_vocab_size", None)
    if not vocabulary or not multiple or not stored:
        return None
    before = Layout.of(common.args).tensor
    # vocab_size lacks what the tokenizer adds, so it is told from the stored padding where that agrees with it
    for extra in range(0, multiple * before):
        if _padded(vocabulary + extra, multiple * before) == stored:
            return _padded(vocabulary + extra, multiple * tensor_ranks)
    return None


def _padded(vocabulary: int, multiple: int) -> int:
    return math.ceil(vocabulary / multiple) * multiple


def _set_layout(common: Common, layout: Layout, format: str, layers: int) -> None:
    args = common.args
    before = Layout.of(args)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = layout.tensor, layout.pipeline
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = layout.expert, layout.expert_tensor
    if before != layout:
        args.transformer_pipeline_model_parallel_size = layout.pipeline
        for name in (
            *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
            *("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        ):
            if hasattr(args, name):
                setattr(args, name, None)
        args.world_size = layout.tensor * layout.pipeline * max(layout.expert, 1)
        args.data_parallel_size = args.world_size // (layout.tensor * layout.pipeline)
        args.sequence_parallel = bool(getattr(args, "sequence_parallel", False)) and layout.tensor > 1
        if layout.tensor > 1 and getattr(args, "num_experts", None):
            args.sequence_parallel = True  # upstream refuses experts with tensor parallelism without it
    args.ckpt_format, args.use_dist_ckpt = format, format == "torch_dist"
    if format == "torch_dist":
        common.state.setdefault("content_metadata", dict(_CONTENT))
    pattern = hybrid_pattern(common)
    if pattern is not None and before.pipeline != layout.pipeline:
        args.hybrid_layer_pattern = _pattern_for(pattern, layout.pipeline, layers)


def _pattern_for(pattern: str, stages: int, layers: int) -> str:
    """Return a hybrid pattern cut into even pipeline segments."""
    main, slash, depths = pattern.replace("|", "").partition("/")
    if stages == 1:
        return main + slash + depths
    return "|".join(main[part.start : part.stop] for part in even_stages(layers, stages)) + slash + depths


def layout_like(reader: Reader, *, tensor: int | None, pipeline: int | None, expert: int | None) -> Layout:
    """Return the source's layout with the sizes that are given; virtual stages go where anything else changes."""
    before = Layout.of(reader.common.args)
    sizes = (tensor or before.tensor, pipeline or before.pipeline, expert or before.expert)
    if sizes == (before.tensor, before.pipeline, before.expert) and before.expert_tensor == before.tensor:
        return before
    return Layout(*sizes, expert_tensor=sizes[0])


def plan_reshard(reader: Reader, layout: Layout, format: str, *, keep_optimizer: bool = True) -> Plan:
    """Return the plan that stores a checkpoint as ranks of another layout would, or in another format.

    Raises:
        ConversionError: a layout that cannot hold the model, or a format that cannot hold the optimizer.
    """
    before = Layout.of(reader.common.args)
    sizes = model_sizes(reader.common.args)
    layout.check(sizes)
    if keep_optimizer:
        refuse_buckets(reader, "reshard")
    layers = 1 + max((find_tensor(entry.name).layer or 0 for entry in reader.entries), default=0)
    if layout.pipeline > layers:
        raise ConversionError(f"{layers} layers cannot be divided among {layout.pipeline} pipeline ranks")
    common = reader.common.copied()
    rows = padded_vocabulary(common, layout.tensor) if layout.tensor != before.tensor else None
    _set_layout(common, layout, format, layers)
    if rows is not None:
        common.args.padded_vocab_size = rows
    steps = []
    for entry, info in reader.entries.items():
        change = entry.name in _VOCABULARY_ROWS and rows is not None and rows != info.shape[0]
        steps.append(_rows_step(entry, info, rows) if change and rows is not None else copy_step(entry, info))
    style = style_of(reader)
    if style is None and format == "torch_dist":
        style = ShardedStyle.of_model(common, {entry.name for entry in reader.entries})
        style = replace(style, combined=reader.common.combined_names)
    plan = Plan(
        f"reshard: {reader.folder} from {before} ({reader.format}) to {layout} ({format})",
        ordered(steps),
        common,
        layout,
        format,
        style if format == "torch_dist" else None,
        keeps_parts=before == layout,
    )
    _random_states(plan, before, layout)
    if not keep_optimizer:
        weights_only(reader, plan)
    elif "optimizer" in common.state:
        _rechain(plan, reader)
    return plan


def _rows_step(entry: Entry, info: TensorInfo, rows: int) -> Step:
    def make(stored: Tensor | None) -> Tensor:
        assert stored is not None
        whole = torch.zeros((rows, *info.shape[1:]), dtype=info.dtype)
        kept = min(rows, info.shape[0])
        whole[:kept] = stored[:kept]
        return whole

    maker: Callable[[Tensor | None], Tensor] = make
    return Step(
        entry, TensorInfo((rows, *info.shape[1:]), info.dtype), entry, maker, "pad" if rows > info.shape[0] else "trim"
    )


def _random_states(plan: Plan, before: Layout, after: Layout) -> None:
    """Keep what belongs to ranks only where the ranks are the same ones."""
    common = plan.common
    if (before.tensor, before.pipeline) != (after.tensor, after.pipeline):
        common.rng = {}
        common.args.no_save_rng = True
        plan.notes.append("random number states belong to the old ranks and were left out: load it with --no-load-rng")
    if before != after:
        common.state.pop("rerun_state_machine", None)


def _rechain(plan: Plan, reader: Reader) -> None:
    """Give the experts their own optimizer, or one for all, as the layout's runs have it."""
    experts = [entry for entry in reader.entries if find_tensor(entry.name).row.expert]
    bare = any(not find_tensor(entry.name).decays(len(reader.entries[entry].shape)) for entry in experts)
    optimizer = plan.common.state["optimizer"]
    apart = bool(experts) and plan.layout.expert > 1
    if len(parts_of(optimizer)) > 1 or apart:
        plan.common.state["optimizer"] = rechained(optimizer, experts_apart=apart, bare_experts=bare)
