#!/usr/bin/env python3
"""Converts checkpoints: streams, controllers' names, parallel layout, format; tells what one holds.

    python tools/checkpoint/convert.py widen   --input runs/mine/checkpoints --output runs/wide --num-streams 4
    python tools/checkpoint/convert.py resize  --input runs/wide --output runs/wide8 --num-streams 8
    python tools/checkpoint/convert.py reshard --input runs/wide --output runs/tp2 --tensor-model-parallel-size 2
    python tools/checkpoint/convert.py import-hf --input llama-3.2-1b --output runs/llama --verify
    python tools/checkpoint/convert.py inspect --input runs/wide

A folder of checkpoints is what training has as --save and --load. One process, no GPU, no Transformer Engine; a tensor
at a time. `convert.py COMMAND --help` says more. Exit status: 0 done, 1 --verify found a difference above the tolerance
(or inspect an incomplete checkpoint), 2 bad input, said in one line, 130 after ^C.

How to add to it: a command is a Command in COMMANDS; its `run` imports what is heavy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout works without an install

import convert_hf
from closed_pipe import run_tool
from quiet_imports import quiet_imports


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        summary: a line for the list of commands.
        example: a whole command line.
        options: adds what only this command has.
        run: does it and returns the exit status.
        all_options: `options` adds all, those of source and target too.
    """

    summary: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    all_options: bool = False


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}: a whole number from {least} is wanted")
        return number

    return parse


def _not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 is wanted")
    return number


def _source_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(*("--input", "--load"), required=True, metavar="DIR", type=Path, help="folder of checkpoints to read")
    add(*("--step", "--ckpt-step"), type=_whole(0), metavar="N", help="the step to read (default: the latest)")


def _target_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(*("--output", "--save"), required=True, metavar="DIR", type=Path, help="folder of checkpoints to make")
    add("--overwrite", action="store_true", help="replace what --output holds (default: refuse)")
    add("--weights-only", action="store_true", help="leave optimizer states out")
    add("--dry-run", action="store_true", help="print what would become of every tensor; write nothing")
    add("--verify", action="store_true", help="load both, run the same tokens, print the largest logit difference")
    add(
        "--tolerance",
        type=_not_negative,
        metavar="X",
        help="largest relative logit difference that --verify accepts (default: 1e-6; 1e-2 for half precision)",
    )


def _widen_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(*("--num-streams", "--wide-residual"), dest="num_streams", required=True, type=_whole(2), metavar="K")
    prefix = "--wide-residual-"
    add(prefix + "streamwise-sigmoid-init-scale", dest="init_scale", type=float, metavar="SCALE", help="as in training")
    add(prefix + "learned-retention", dest="retention", action="store_true", help="as in training")
    add(prefix + "retention-init", dest="retention_init", type=float, metavar="G", help="as in training")
    add(prefix + "retention-max-forget", dest="max_forget", type=float, metavar="F", help="as in training")


def _resize_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(*("--num-streams", "--wide-residual"), dest="num_streams", required=True, type=_whole(2), metavar="K")
    add("--average", action="store_true", help="fewer streams: merge neighbouring ones (lossy; it is said by how much)")
    add(
        "--spread",
        type=_not_negative,
        default=0.0,
        metavar="X",
        help="more streams: set the write factors of a stream's copies apart by up to this share, their mean kept, so "
        "that the copies can learn to differ (default: 0, copies stay equal for ever)",
    )


def _rekey_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--names",
        required=True,
        choices=("combined", "split"),
        help="combined: residual_connection_*, of older versions; split: residual_read_* and residual_write_*",
    )


def _reshard_options(parser: argparse.ArgumentParser) -> None:
    for name, what in (("tensor", "TP"), ("pipeline", "PP"), ("expert", "EP")):
        parser.add_argument(
            f"--{name}-model-parallel-size",
            dest=name,
            type=_whole(1),
            metavar=what,
            help="of the result (default: as the source)",
        )
    parser.add_argument(
        *("--format", "--ckpt-format"), choices=("torch_dist", "torch"), help="of the result (default: as the source)"
    )


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _note(text: str) -> None:
    print(f"> {text}", file=sys.stderr, flush=True)


def _convert(args: argparse.Namespace, plan_of: Callable) -> int:
    """Open the source, make the plan, and print it or carry it out."""
    from megatron.training.checkpoints.companions import flaw_of, weight_flaw_of
    from megatron.training.checkpoints.conversion import execute
    from megatron.training.checkpoints.open_checkpoint import open_reader
    from megatron.training.checkpoints.output_folder import check_output, restore_replaced

    if not args.dry_run:
        restore_replaced(args.output)
    check_output(args.output, args.overwrite, args.input)
    with open_reader(args.input, args.step, flaw_in=weight_flaw_of if args.weights_only else flaw_of) as reader:
        plan = plan_of(reader)
        if args.dry_run:
            print("\n".join(plan.lines()))
            return 0
        for note in plan.notes:
            _note(note)
        outcome = execute(plan, reader, args.output, overwrite=args.overwrite)
        half = any(info.dtype.itemsize < 4 for info in reader.entries.values())
    _note(
        f"{args.output}: {outcome.tensors} tensors, {outcome.nbytes:,} bytes; peak memory {outcome.peak_bytes:,} "
        f"bytes, largest layer {outcome.largest_layer:,} bytes"
    )
    return _verify(args, 1e-2 if half else 1e-6, plan.inexact) if args.verify else 0


def _verify(args: argparse.Namespace, tolerance: float, inexact: str | None) -> int:
    from megatron.training.checkpoints.verification import compare

    tolerance = tolerance if args.tolerance is None else args.tolerance
    difference = compare(args.input, args.output, args.step)
    accepted = difference.largest_relative <= tolerance
    verdict = "the same function" if accepted else "NOT the same function"
    print(f"{difference}; tolerance {tolerance:g}: {verdict}{'' if inexact is None else f' ({inexact})'}")
    return 0 if accepted else 1


def _widen(args: argparse.Namespace) -> int:
    from megatron.core.transformer.wide_residual_config import WideResidualConfig
    from megatron.training.checkpoints.errors import ConversionError
    from megatron.training.checkpoints.widen import plan_widen

    if not args.retention and (args.retention_init is not None or args.max_forget is not None):
        raise ConversionError(
            "retention bounds are given without --wide-residual-learned-retention; add it, or leave them out"
        )
    given = {
        "streamwise_sigmoid_init_scale": args.init_scale,
        "learned_retention": args.retention or None,
        "retention_init": args.retention_init,
        "retention_max_forget": args.max_forget,
    }
    try:
        config = WideResidualConfig(
            args.num_streams, **{name: value for name, value in given.items() if value is not None}
        )
    except (TypeError, ValueError) as error:
        raise ConversionError(str(error)) from error
    return _convert(args, lambda reader: plan_widen(reader, config, keep_optimizer=not args.weights_only))


def _resize(args: argparse.Namespace) -> int:
    from megatron.training.checkpoints.resize import plan_resize

    return _convert(
        args,
        lambda reader: plan_resize(
            reader, args.num_streams, merge=args.average, spread=args.spread, keep_optimizer=not args.weights_only
        ),
    )


def _rekey(args: argparse.Namespace) -> int:
    from megatron.training.checkpoints.rekey import plan_rekey

    return _convert(args, lambda reader: plan_rekey(reader, args.names, keep_optimizer=not args.weights_only))


def _reshard(args: argparse.Namespace) -> int:
    from megatron.training.checkpoints.reshard import layout_like, plan_reshard

    def plan(reader):
        layout = layout_like(reader, tensor=args.tensor, pipeline=args.pipeline, expert=args.expert)
        return plan_reshard(reader, layout, args.format or reader.format, keep_optimizer=not args.weights_only)

    return _convert(args, plan)


def _inspect(args: argparse.Namespace) -> int:
    import json

    from megatron.training.checkpoints.inspection import inspect_checkpoint, report_lines

    report = inspect_checkpoint(args.input, args.step)
    print(json.dumps(report) if args.json else "\n".join(report_lines(report)))
    return 0 if report["complete"] else 1


COMMANDS: dict[str, Command] = {
    "widen": Command(
        "an ordinary checkpoint gets K streams and computes the same",
        "convert.py widen --input runs/plain/checkpoints --output runs/wide --num-streams 4 --verify",
        _widen_options,
        _widen,
    ),
    "resize": Command(
        "another number of streams",
        "convert.py resize --input runs/wide --output runs/wide8 --num-streams 8 --spread 0.01",
        _resize_options,
        _resize,
    ),
    "rekey": Command(
        "controllers get their older names, or today's",
        "convert.py rekey --input runs/old --output runs/new --names split",
        _rekey_options,
        _rekey,
    ),
    "reshard": Command(
        "another parallel layout or format",
        "convert.py reshard --input runs/wide --output runs/tp2 --tensor-model-parallel-size 2 --format torch",
        _reshard_options,
        _reshard,
    ),
    "import-hf": Command(
        "a Hugging Face folder becomes a checkpoint, widened on demand",
        convert_hf.IMPORT_EXAMPLE,
        convert_hf.import_options,
        convert_hf.run_import,
        all_options=True,
    ),
    "export-hf": Command(
        "a checkpoint becomes a Hugging Face folder, wide ones with their modelling files",
        convert_hf.EXPORT_EXAMPLE,
        convert_hf.export_options,
        convert_hf.run_export,
        all_options=True,
    ),
    "inspect": Command(
        "what a checkpoint holds",
        "convert.py inspect --input runs/wide --json",
        _inspect_options,
        _inspect,
    ),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        description="Convert checkpoints.",
        epilog=f"example: {COMMANDS['widen'].example}",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog=f"example: {command.example}",
            allow_abbrev=False,
        )
        if not command.all_options:
            _source_options(sub)
            if name != "inspect":
                _target_options(sub)
        command.options(sub)
        sub.add_argument("--verbose", action="store_true", help="show what megatron says")
    return parser.parse_args(argv)


def _status(args: argparse.Namespace) -> int:
    """Run; print what the user can put right as one line."""
    try:
        with quiet_imports():
            from megatron.cpu.host import HostChoiceError
            from megatron.training.checkpoints import errors, verification  # noqa: F401
            from megatron.training.resume.errors import CheckpointError
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with nullcontext() if args.verbose else quiet_imports():
            return COMMANDS[args.command].run(args)
    except (errors.ConversionError, CheckpointError, HostChoiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        return _status(args)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was left behind", file=sys.stderr)
        return 130


if __name__ == "__main__":
    run_tool(main)
