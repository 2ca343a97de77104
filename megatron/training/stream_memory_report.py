"""Saved activation bytes of every pipeline stage of a GPT: ordinary, wide, and wide with replay for every block size.

    with lone_rank(args):
        report = build_report(args, measure=False)
    report.stages[0].rows                 # the ordinary model, wide without replay, replay with N = 1, 2, ...
    report.as_dict()                      # the same as plain data, for JSON

Counted is what the decoder stack keeps for the backward on one rank: layers, final norm and readout. Embedding, output
layer and loss, the same in both models, are not counted, nor are parameters and gradients on their way.

    kept     per micro-batch, over all model chunks of the stage, after its forward
    rebuilt  by replay, while the backward is in one block
    held     the most at any moment: kept by all micro-batches in flight, and one rebuilt block

What always holds: predictions come from stacks of two short layers (layer_activations) and the arithmetic of
stream_memory; with measure, the stacks are also built in full and what autograd holds is counted beside them. `held` is
an upper bound, exact where the block size divides the layers.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.training.argument_utils import core_transformer_config_from_args

from megatron.training.layer_activations import (
    HeldBytes,
    LayerKind,
    fit_layers,
    layer_kinds,
    measure_stack,
    stack_arguments,
)
from megatron.training.stream_layout import chunk_layers, stage_loads, stream_costs
from megatron.training.stream_memory import (
    StageLoad,
    StreamCosts,
    best_block_size,
    blocks_of,
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
    """The rows of one pipeline stage. in_flight counts forwards of a model chunk."""

    stage: int
    chunk_layers: list[int]
    in_flight: int
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
    """A model chunk: its layers, and whether the final norm follows them."""

    kinds: tuple[LayerKind, ...]
    head: bool


class _Predictor:
    """Bytes of chunks under one configuration."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        parallel_length = args.tensor_model_parallel_size if args.sequence_parallel else 1
        self.tokens = args.seq_length * args.micro_batch_size // parallel_length
        ordinary = core_transformer_config_from_args(stack_arguments(args, ["dense"], None, None))
        retention = bool(args.wide_residual_learned_retention)
        self.costs: StreamCosts = stream_costs(ordinary, args.wide_residual, learned_retention=retention)
        # The fit knows one dtype; an fp32 stream makes the norm's input, and the dropout's mask, larger.
        narrow = stream_costs(
            core_transformer_config_from_args(
                stack_arguments(Namespace(**{**vars(args), "fp32_residual_connection": False}), ["dense"], None, None)
            ),
            args.wide_residual,
        )
        wider = self.costs.narrow - narrow.narrow + self.costs.mask - narrow.mask
        self._fp32_stream = self.tokens * self.costs.branches_per_layer * wider
        self.fits = {kind: fit_layers(args, kind) for kind in sorted(set(layer_kinds(args)))}

    def kept(self, chunk: _Chunk, model: str, block_size: int | None) -> tuple[int, int]:
        """Bytes that one forward of a chunk keeps: of its layers, and of its head."""
        layers = self.fits[chunk.kinds[0]].shared(self.args.seq_length) if chunk.kinds else 0
        for kind in chunk.kinds:
            ordinary = self.fits[kind].layer(self.args.seq_length) + self._fp32_stream
            if model == "wide":
                ordinary += self.tokens * self.costs.eager_layer(0)
            elif model == "replay":
                ordinary += self.tokens * self.costs.replayed_layer(0)
            layers += ordinary
        if block_size is not None:
            layers += self.tokens * self.costs.block * len(blocks_of(len(chunk.kinds), block_size))
        head = self.costs.ordinary_head if model == "ordinary" else self.costs.wide_head
        return layers, self.tokens * head if chunk.head else 0

    def row(self, chunks: Sequence[_Chunk], in_flight: int, model: str, block_size: int | None) -> Row:
        """The row of a model on a stage."""
        kept = [self.kept(chunk, model, block_size) for chunk in chunks]
        row = Row(model, block_size, kept=sum(map(sum, kept)), rebuilt=0, held=0)
        largest = max(layers for layers, _ in kept)
        if block_size is None:
            # The last chunk's head is there once: its backward follows its forward at once.
            row.held = in_flight * largest + max(head for _, head in kept)
            return row
        layers = max(len(chunk.kinds) for chunk in chunks)
        row.rebuilt = self.tokens * self.costs.rebuilt(min(block_size, layers))
        row.held = in_flight * largest + max(row.rebuilt, *(head for _, head in kept))
        for chunk in chunks:
            work = replay_work(len(chunk.kinds), block_size, self.costs, self.args.hidden_size)
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


def _chunks_of_stages(args: Namespace, layers: list[list[int]]) -> list[list[_Chunk]]:
    """Return the chunks of every stage; layers run through chunk 0 of all stages, then chunk 1, ..."""
    kinds, start = layer_kinds(args), 0
    stages: list[list[_Chunk]] = [[] for _ in layers]
    for chunk in range(len(layers[0])):
        for stage, stage_layers in enumerate(layers):
            head = chunk == len(layers[0]) - 1 and stage == len(layers) - 1
            stages[stage].append(_Chunk(tuple(kinds[start : start + stage_layers[chunk]]), head))
            start += stage_layers[chunk]
    return stages


def _describe(args: Namespace) -> dict[str, Any]:
    return {
        "num_layers": args.num_layers,
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
    """Return the report of a wide GPT for validated arguments, inside lone_rank(args).

    With measure the stacks of the ordinary model, of wide streams and of the best replay block are run on this host,
    and those of the block sizes also_measure.
    """
    config = core_transformer_config_from_args(_without_replay(args))
    predictor, measurer = _Predictor(args), _Measurer(args)
    loads: list[StageLoad] = stage_loads(args, config)
    best = best_block_size(loads, predictor.costs)
    layers = chunk_layers(config)
    report = StreamMemoryReport(_describe(args), best, [])
    for number, (chunks, load) in enumerate(zip(_chunks_of_stages(args, layers), loads, strict=True)):
        stage = StageReport(number, layers[number], load.in_flight)
        models: list[tuple[str, int | None]] = [("ordinary", None), ("wide", None)]
        models += [("replay", size) for size in range(1, max(load.num_layers for load in loads) + 1)]
        for model, size in models:
            row = predictor.row(chunks, load.in_flight, model, size)
            if measure and size in (None, best, *also_measure):
                measurer.fill(row, chunks, load.in_flight)
            stage.rows.append(row)
        report.stages.append(stage)
    return report


def _without_replay(args: Namespace) -> Namespace:
    """Arguments whose recompute modules Megatron's own configuration accepts."""
    modules = stack_arguments(args, ["dense"], None, None).recompute_modules
    return Namespace(**{**vars(args), "recompute_modules": modules})
