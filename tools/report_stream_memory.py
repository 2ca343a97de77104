#!/usr/bin/env python3
"""Prints what a wide GPT or hybrid keeps for the backward on every pipeline stage: ordinary, wide, and with replay.

    python tools/report_stream_memory.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 \\
        --seq-length 1024 --wide-residual 4 --bf16
    python tools/report_stream_memory.py --hybrid-layer-pattern "M*-M-|M*-M-" --pipeline-model-parallel-size 2 ...
    python tools/report_stream_memory.py --checkpoint runs/wide/checkpoints --json memory.json
    python tools/report_stream_memory.py --measure --plot memory.png -- --num-layers 12 ...

The model is given by Megatron's own flags, or by those that a checkpoint stores (torch_dist or plain format); flags
given besides come first where the checkpoint leaves them open. With --hybrid-layer-pattern (M, *, - and E, shortcut MoE
too) it is a hybrid of pretrain_mamba.py, else a GPT of pretrain_gpt.py. What --micro-batch-size and
--max-position-embeddings leave open is 1 and the sequence length. The process count is the smallest that the layout
needs, and without --global-batch-size there are micro-batches enough to fill the pipeline.

Layers of --transformer-impl local, Mamba layers on PyTorch's operators, are built on the CPU, two at a time and at
short lengths, so any machine can answer for any layout. docs/memory.md says what is counted. The block size marked
`best` is the one that --residual-stream-recompute-num-layers auto takes.

What always holds: nothing is trained, and files are written beside and renamed into place. Exit status: 0 done, 2 bad
options.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from closed_pipe import run_tool
from quiet_imports import quiet_imports

if TYPE_CHECKING:
    from megatron.training.stream_memory_report import Row, StageReport, StreamMemoryReport

MIB = 2**20


class ReportError(Exception):
    """What was asked for cannot be reported."""


def parse_own_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this tool's options, and the flags that are Megatron's."""
    parser = argparse.ArgumentParser(
        description="Saved activation bytes of a wide GPT or hybrid on every pipeline stage: the ordinary model, wide "
        "without replay, and wide with replay for each block size.",
        epilog="All other flags are Megatron's and say what the model is, for example: "
        "report_stream_memory.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
        "--wide-residual 4 --bf16 --pipeline-model-parallel-size 2. With --hybrid-layer-pattern the model is a hybrid "
        "of M Mamba-2, * attention, - MLP and E MoE layers, | between pipeline segments; a layer is one symbol then.",
        usage="%(prog)s [options] [--] MEGATRON_FLAGS",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="take the model's flags from a checkpoint")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also build the layer stacks in full on this host, run one micro-batch, and count what autograd holds",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw what the stages hold into FILE (PNG)")
    own, megatron_flags = parser.parse_known_args(argv)
    for option in ("json", "plot"):
        path = getattr(own, option)
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"argument --{option}: the folder {path.resolve().parent} does not exist")
    if own.plot is not None and own.plot.suffix != ".png":
        parser.error(f"argument --plot: a name that ends in .png is wanted, got {own.plot.name!r}")
    if own.checkpoint is not None and not (own.checkpoint / "latest_checkpointed_iteration.txt").is_file():
        parser.error(
            f"argument --checkpoint: {own.checkpoint} holds no latest_checkpointed_iteration.txt; the folder that was "
            "given to --save is wanted"
        )
    return own, [flag for flag in megatron_flags if flag != "--"]


def refuse_prediction_depths(args: argparse.Namespace) -> None:
    """Refuse multi-token prediction, as soon as the arguments say it."""
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern or ""
    main, *depths = pattern.split("/")
    if args.use_checkpoint_args and (depths or args.mtp_num_layers):
        raise ReportError(
            "the checkpoint's model has multi-token prediction, whose layers are not counted here; give the model's "
            "flags without it instead of the checkpoint"
        )
    if depths:
        raise ReportError(
            f"--hybrid-layer-pattern {pattern}: the layers of multi-token prediction, after '/', have no streams and "
            f'are not counted here; give --hybrid-layer-pattern "{main}"'
        )
    if args.mtp_num_layers:
        raise ReportError("--mtp-num-layers: the layers of multi-token prediction are not counted here; leave it out")


def check_model(args: argparse.Namespace) -> None:
    """Refuse what the training script of the model refuses, before all other checks."""
    from megatron.training.hybrid_arguments import given_pattern
    from megatron.training.model_kinds import MODEL_KINDS, as_choice_error

    refuse_prediction_depths(args)
    with as_choice_error():
        is_hybrid = given_pattern(args) is not None
    MODEL_KINDS["hybrid" if is_hybrid else "gpt"].check(args)


def complete_arguments(args: argparse.Namespace) -> None:
    """Set what a memory report needs and the user may leave open, before upstream validates."""
    if args.wide_residual is None:
        if args.use_checkpoint_args:
            raise ReportError(
                "the checkpoint's model has one residual stream; give its flags and --wide-residual K instead of it"
            )
        raise ReportError("no --wide-residual K given: there are no wide streams to report on; give 2 or more")
    if args.recompute_granularity == "full":
        raise ReportError("--recompute-granularity full keeps no streams to replay; leave it out, or use selective")
    if args.experimental_attention_variant is not None:
        raise ReportError("--experimental-attention-variant: its layers cannot be built here; leave it out")
    if args.num_experts is not None and args.tensor_model_parallel_size > 1:
        raise ReportError(
            "--num-experts with --tensor-model-parallel-size: what experts receive cannot be told without the other "
            "ranks; report on --tensor-model-parallel-size 1"
        )
    layout = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.world_size = max(args.world_size, layout * args.expert_model_parallel_size)
    args.micro_batch_size = args.micro_batch_size or 1
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.vocab_size = args.vocab_size or 1
    if args.global_batch_size is None:
        enough = 4 * args.pipeline_model_parallel_size
        args.global_batch_size = args.micro_batch_size * (args.world_size // layout) * enough


def megatron_arguments(own: argparse.Namespace, flags: list[str]) -> argparse.Namespace:
    """Parse and validate Megatron's flags as the training scripts do; ReportError for what it refuses."""
    from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, validated_arguments

    if own.checkpoint is not None:
        flags = [*flags, "--load", str(own.checkpoint), "--use-checkpoint-args"]
    first = ArgumentExtension(
        lambda parser: parser, before_restoring=refuse_prediction_depths, before_validation=check_model
    )
    last = ArgumentExtension(lambda parser: parser, before_validation=complete_arguments)
    before, said = sys.argv, io.StringIO()
    sys.argv = [before[0], *flags]
    try:
        with contextlib.redirect_stdout(said):
            return validated_arguments("cpu", (first, *ARGUMENT_EXTENSIONS, last))
    finally:
        sys.argv = before


def make_report(own: argparse.Namespace, flags: list[str]) -> StreamMemoryReport:
    """Build the report on the CPU host."""
    from megatron.cpu.host import cpu_host
    from megatron.training.data.errors import DataError
    from megatron.training.local_defaults import LocalChoiceError

    with cpu_host():
        try:
            args = megatron_arguments(own, flags)
            with contextlib.redirect_stdout(io.StringIO()):
                from megatron.training.layer_activations import lone_rank
                from megatron.training.stream_memory_report import build_report

                with lone_rank(args):
                    return build_report(args, measure=own.measure)
        except LocalChoiceError as error:
            raise ReportError(str(error)) from error  # with the line that points into a pattern
        except (DataError, ValueError, TypeError, RuntimeError) as error:
            raise ReportError(str(error).splitlines()[0]) from error


def _mib(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / MIB:,.1f}" if value < 1000 * MIB else f"{value / MIB:,.0f}"


def _name(row: Row, best: int) -> str:
    if row.block_size is None:
        return row.model
    return f"N={row.block_size}" + (" best" if row.block_size == best else "")


def _headline(model: dict[str, Any]) -> str:
    layout = f"TP {model['tensor_parallel']}{' SP' if model['sequence_parallel'] else ''}"
    layout += f", PP {model['pipeline_parallel']} x {model['virtual_pipeline_chunks']}"
    layers = f"{model['num_layers']} layers"
    if model["hybrid_layer_pattern"] is not None:
        layers += f" {model['hybrid_layer_pattern']}"
    return (
        f"{layers}, D={model['hidden_size']}, K={model['num_streams']}, {model['dtype']}"
        f"{' with an fp32 stream' if model['fp32_residual_connection'] else ''}, {model['seq_length']} tokens x "
        f"{model['micro_batch_size']}, {layout}\n"
        "MiB on one rank. kept: for one micro-batch; rebuilt: by replay, in one block; held: at most, by all\n"
        "micro-batches in flight and one rebuilt block; x: held over what the ordinary model holds; GFLOP, GB: what\n"
        "replay computes and moves again per micro-batch; *: counted on this host"
    )


def print_report(report: StreamMemoryReport, measured: bool) -> None:
    """The report as one table per stage on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(_headline(report.model), highlight=False, soft_wrap=True)
    for stage in report.stages:
        chunks = "+".join(map(str, stage.chunk_layers)) + " layers"
        if stage.chunk_patterns is not None:
            chunks += f" {' + '.join(stage.chunk_patterns)}"
        of_what = "micro-batches" if len(stage.chunk_layers) == 1 else "forwards of a chunk"
        table = Table(title=f"stage {stage.stage}: {chunks}, {stage.in_flight} {of_what} in flight")
        table.add_column("model", no_wrap=True)
        for column in ["kept", "rebuilt", "held", "x", "GFLOP", "GB", *(["kept*", "held*"] if measured else [])]:
            table.add_column(column, justify="right", no_wrap=True)
        ordinary = stage.row("ordinary")
        for row in stage.rows:
            replays = row.block_size is not None
            cells = [_mib(row.kept), _mib(row.rebuilt) if replays else "", _mib(row.held)]
            cells.append(f"{row.held / ordinary.held:.2f}" if ordinary.held else "")
            cells += [f"{row.extra_flops / 1e9:.2f}", f"{row.extra_bytes / 1e9:.2f}"] if replays else ["", ""]
            if measured:
                cells += [_mib(row.measured_kept), _mib(row.measured_held)]
            best = row.block_size == report.best_block_size
            table.add_row(_name(row, report.best_block_size), *cells, style="bold" if best else None)
        console.print(table)


def draw(report: StreamMemoryReport, path: Path) -> None:
    """Draw what every stage holds over the block size into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(report.stages), figsize=(5 * len(report.stages), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, stage in zip(axes[0], report.stages, strict=True):
        _draw_stage(axis, stage, report.best_block_size)
    axes[0][0].set_ylabel("held for the backward, MiB")
    axes[0][0].legend()
    with written_beside(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    pyplot.close(figure)


def _draw_stage(axis: Any, stage: StageReport, best: int) -> None:
    replays = [row for row in stage.rows if row.model == "replay"]
    sizes = [row.block_size or 0 for row in replays]
    axis.axhline(stage.row("ordinary").held / MIB, color="black", label="ordinary")
    axis.axhline(stage.row("wide").held / MIB, color="tab:red", label="wide, no replay")
    axis.plot(sizes, [row.held / MIB for row in replays], marker="o", color="tab:blue", label="wide, replay")
    axis.plot(best, stage.row("replay", best).held / MIB, marker="*", markersize=14, color="tab:green", label="best")
    measured = [(row.block_size or sizes[0], row.measured_held / MIB) for row in stage.rows if row.measured_held]
    if measured:
        axis.plot(*zip(*measured, strict=True), "x", color="gray", label="measured")
    axis.set_title(f"stage {stage.stage}, {stage.in_flight} in flight")
    axis.set_xlabel("layers in a replay block")
    axis.set_ylim(bottom=0)


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a name beside path; rename it to path at the end."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    own, flags = parse_own_arguments(sys.argv[1:] if argv is None else argv)
    try:
        with quiet_imports():
            report = make_report(own, flags)
        print_report(report, own.measure)
        if own.json:
            with written_beside(own.json) as unfinished:
                unfinished.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        if own.plot:
            draw(report, own.plot)
    except (ReportError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
