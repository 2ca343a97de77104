"""Saved activation bytes of every pipeline stage of a GPT or hybrid: ordinary, wide, and wide with replay for every
block size.

    with lone_rank(args):
        report = build_report(args, measure=False)
    report.stages[0].rows                 # the ordinary model, wide without replay, replay with N = 1, 2, ...
    report.as_dict()                      # the same as plain data, for JSON

Counted is what the decoder stack keeps for the backward on one rank: layers, final norm and readout. Embedding, output
layer and loss, the same in both models, are not counted, nor are parameters and gradients on their way.

    kept     per micro-batch, over all model chunks of the stage, after its forward
    rebuilt  by replay, while the backward is in one block
    held     the most at any moment: kept by all micro-batches in flight, and one rebuilt block

What always holds: predictions come from stacks of two short layers of each kind (layer_activations) and the arithmetic
of stream_memory; with measure, the stacks are also built in full and what autograd holds is counted beside them. `held`
is an upper bound, exact where the block size divides the layers; where the chunks of a stage differ, all forwards in
flight are taken for those of the chunk that keeps the most.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.training.argument_utils import core_transformer_config_from_args

from megatron.training.layer_activations import HeldBytes, fit_layers, measure_stack, stack_arguments
from megatron.training.layer_kinds import (
    has_attention,
    is_hybrid,
    is_pair,
    layers_in,
    mamba_layers,
    stage_kinds,
)
from megatron.training.stream_layout import chunk_load, forwards_in_flight, model_costs
from megatron.training.stream_memory import (
    StageLoad,
    StreamCosts,
    best_block_size,
    blocks_of,
    most_rebuilt,
    replay_work,
)


@dataclass
class Row:
    """One model on one stage; bytes of this rank. extra_*: what replay computes again per micro-batch."""

    model: str
    block_size: int | None
    kept: int
    rebuilt: int
    held: int
    extra_flops: int = 0
    extra_bytes: int = 0
    measured_kept: int | None = None
    measured_held: int | None = None


@dataclass
class StageReport:
    """The rows of one pipeline stage. in_flight counts forwards of a model chunk; chunk_patterns are a hybrid's."""

    stage: int
    chunk_layers: list[int]
    in_flight: int
    chunk_patterns: list[str] | None = None
    rows: list[Row] = field(default_factory=list)

    def row(self, model: str, block_size: int | None = None) -> Row:
        """Return the row of a model."""
        return next(row for row in self.rows if (row.model, row.block_size) == (model, block_size))


@dataclass
class StreamMemoryReport:
    """The whole model; best_block_size is what `--residual-stream-recompute-num-layers auto` takes."""

    model: dict[str, Any]
    best_block_size: int
    stages: list[StageReport]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Chunk:
    """A model chunk: its layers by kind, its place in the schedule, and whether the final norm follows it."""

    kinds: tuple[str, ...]
    load: StageLoad
    head: bool


class _Predictor:
    """Bytes of chunks under one configuration."""

    def __init__(self, args: Namespace, stages: Sequence[Sequence[Sequence[str]]]) -> None:
        self.args = args
        parallel_length = args.tensor_model_parallel_size if args.sequence_parallel else 1
        self.tokens = args.seq_length * args.micro_batch_size // parallel_length
        kinds = sorted({kind for chunks in stages for kinds in chunks for kind in kinds})
        self.costs = self._costs(kinds)
        self._shared: dict[str, int] = {}
        self._kept: dict[str, dict[str, int]] = {}
        for kind in kinds:
            self._add_kind(kind)

    def _costs(self, kinds: Sequence[str], **changed: Any) -> StreamCosts:
        """Costs of the streams around these kinds, where arguments are changed."""
        args = Namespace(**{**vars(self.args), **changed})
        config = core_transformer_config_from_args(stack_arguments(args, kinds, None, None))
        retention = bool(args.wide_residual_learned_retention)
        return model_costs(args, config, args.wide_residual, kinds, retention=retention)

    def _add_kind(self, kind: str) -> None:
        """Find what the layers of a kind keep in the ordinary model, in the wide one, and under replay."""
        fit = fit_layers(self.args, kind)
        # The fit knows one dtype; an fp32 stream makes the norm's input, and the dropout's mask, larger.
        costs, narrow = self._costs([kind]), self._costs([kind], fp32_residual_connection=False)
        layers = layers_in(kind)
        wider = layers * costs.branches_per_layer * (costs.narrow - narrow.narrow + costs.mask - narrow.mask)
        ordinary = fit.layer(self.args.seq_length) + self.tokens * wider
        eager, replayed = layers * costs.eager_layer(0), layers * costs.replayed_layer(0)
        if is_pair(kind):
            eager, replayed = eager + costs.eager_shortcut, replayed + costs.replayed_shortcut
        self._shared[kind] = fit.shared(self.args.seq_length) if has_attention(kind) else 0
        self._kept[kind] = {
            "ordinary": ordinary - self.tokens * mamba_layers(kind) * (costs.narrow - narrow.narrow),
            "wide": ordinary + self.tokens * eager,
            "replay": ordinary + self.tokens * replayed,
        }

    def kept(self, chunk: _Chunk, model: str, block_size: int | None) -> tuple[int, int]:
        """Bytes that one forward of a chunk keeps: of its layers, and of its head."""
        layers = max((self._shared[kind] for kind in chunk.kinds), default=0)
        layers += sum(self._kept[kind][model] for kind in chunk.kinds)
        if block_size is not None:
            layers += self.tokens * self.costs.block * len(blocks_of(chunk.load, block_size))
        head = self.costs.ordinary_head if model == "ordinary" else self.costs.wide_head
        return layers, self.tokens * head if chunk.head else 0

    def row(self, chunks: Sequence[_Chunk], model: str, block_size: int | None) -> Row:
        """The row of a model on a stage."""
        in_flight = chunks[0].load.in_flight
        kept = [self.kept(chunk, model, block_size) for chunk in chunks]
        row = Row(model, block_size, kept=sum(map(sum, kept)), rebuilt=0, held=0)
        largest = max(layers for layers, _ in kept)
        if block_size is None:
            # The last chunk's head is there once: its backward follows its forward at once.
            row.held = in_flight * largest + max(head for _, head in kept)
            return row
        row.rebuilt = self.tokens * max(most_rebuilt(chunk.load, self.costs, block_size) for chunk in chunks)
        row.held = in_flight * largest + max(row.rebuilt, *(head for _, head in kept))
        for chunk in chunks:
            work = replay_work(chunk.load, block_size, self.costs, self.args.hidden_size)
            row.extra_flops += self.tokens * work.flops
            row.extra_bytes += self.tokens * work.bytes_moved
        return row


class _Measurer:
    """What chunks really hold; equal chunks are measured once."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._known: dict[Any, HeldBytes] = {}

    def _measured(self, chunk: _Chunk, model: str, block_size: int | None) -> HeldBytes:
        key = (chunk, model, block_size)
        if key not in self._known:
            streams = None if model == "ordinary" else self._args.wide_residual
            self._known[key] = measure_stack(
                self._args, chunk.kinds, num_streams=streams, block_size=block_size, head=chunk.head
            )
        return self._known[key]

    def fill(self, row: Row, chunks: Sequence[_Chunk], in_flight: int) -> None:
        """Measure a row: one micro-batch of every chunk; others in flight are taken to keep what it keeps."""
        if row.model == "ordinary" and self._args.fp32_residual_connection and self._args.params_dtype.itemsize < 4:
            return  # PyTorch's norms refuse an fp32 stream beside 16-bit weights
        measured = [self._measured(chunk, row.model, row.block_size) for chunk in chunks if chunk.kinds]
        if measured:
            row.measured_kept = sum(held.kept for held in measured)
            row.measured_held = (in_flight - 1) * max(held.kept for held in measured) + max(
                held.most for held in measured
            )


def _chunks_of_stages(stages: Sequence[Sequence[tuple[str, ...]]], in_flight: Sequence[int]) -> list[list[_Chunk]]:
    """Return the chunks of every stage; the final norm follows the last chunk of the last stage."""
    return [
        [
            _Chunk(kinds, chunk_load(kinds, forwards), chunks is stages[-1] and place == len(chunks) - 1)
            for place, kinds in enumerate(chunks)
        ]
        for chunks, forwards in zip(stages, in_flight, strict=True)
    ]


def _describe(args: Namespace) -> dict[str, Any]:
    return {
        "num_layers": args.num_layers,
        "hybrid_layer_pattern": args.hybrid_layer_pattern,
        "hidden_size": args.hidden_size,
        "num_streams": args.wide_residual,
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "fp32_residual_connection": args.fp32_residual_connection,
        "tensor_parallel": args.tensor_model_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "pipeline_parallel": args.pipeline_model_parallel_size,
        "virtual_pipeline_chunks": args.virtual_pipeline_model_parallel_size or 1,
        "micro_batches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
    }


def build_report(args: Namespace, *, measure: bool = False, also_measure: Sequence[int] = ()) -> StreamMemoryReport:
    """Return the report of a wide model for validated arguments, inside lone_rank(args).

    With measure the stacks of the ordinary model, of wide streams and of the best replay block are run on this host,
    and those of the block sizes also_measure.
    """
    config = core_transformer_config_from_args(_without_replay(args))
    stages = stage_kinds(args, config)
    in_flight = forwards_in_flight(args, config, stages)
    predictor, measurer = _Predictor(args, stages), _Measurer(args)
    chunks_of_stages = _chunks_of_stages(stages, in_flight)
    loads = [chunk.load for chunks in chunks_of_stages for chunk in chunks]
    best = best_block_size(loads, predictor.costs)
    models: list[tuple[str, int | None]] = [("ordinary", None), ("wide", None)]
    models += [("replay", size) for size in range(1, max(load.num_layers for load in loads) + 1)]
    report = StreamMemoryReport(_describe(args), best, [])
    for number, chunks in enumerate(chunks_of_stages):
        stage = StageReport(number, [chunk.load.num_layers for chunk in chunks], in_flight[number])
        if is_hybrid(args):
            stage.chunk_patterns = ["".join(chunk.kinds) for chunk in chunks]
        for model, size in models:
            row = predictor.row(chunks, model, size)
            if measure and size in (None, best, *also_measure):
                measurer.fill(row, chunks, in_flight[number])
            stage.rows.append(row)
        report.stages.append(stage)
    return report


def _without_replay(args: Namespace) -> Namespace:
    """Arguments whose recompute modules Megatron's own configuration accepts."""
    modules = stack_arguments(args, [], None, None).recompute_modules
    return Namespace(**{**vars(args), "recompute_modules": modules})
