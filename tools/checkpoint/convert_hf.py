"""The commands import-hf and export-hf of convert.py: Hugging Face folders (Llama, Mamba-2) and checkpoints.

    python tools/checkpoint/convert.py import-hf --input llama-3.2-1b --output runs/llama --num-streams 4 --verify
    python tools/checkpoint/convert.py export-hf --input runs/llama --output llama-out --verify

What always holds: nothing heavy is imported before a command runs; what cannot be converted is a ConversionError, and
nothing half-written is left.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.transformer.wide_residual_config import WideResidualConfig
    from megatron.training.checkpoints.conversion import Outcome

IMPORT_EXAMPLE = "convert.py import-hf --input llama-3.2-1b --output runs/llama --num-streams 4 --verify"
EXPORT_EXAMPLE = "convert.py export-hf --input runs/llama --output llama-out --verify"


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


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 is wanted")
    return number


def _shared_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print what becomes of every tensor; write nothing")
    add("--verify", action="store_true", help="run the same tokens through transformers and Megatron; compare logits")
    add(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="largest relative logit difference that --verify accepts (default: 1e-5; 1e-2 in fp16, 5e-2 in bf16)",
    )


def import_options(parser: argparse.ArgumentParser) -> None:
    """Add what import-hf takes."""
    add = parser.add_argument
    add("--input", required=True, metavar="DIR", type=Path, help="folder with config.json and safetensors")
    add(*("--output", "--save"), required=True, metavar="DIR", type=Path, help="folder of checkpoints to make")
    add("--overwrite", action="store_true", help="replace what --output holds (default: refuse)")
    add(
        *("--format", "--ckpt-format"),
        default="torch_dist",
        choices=("torch_dist", "torch"),
        help="of the result (default: %(default)s)",
    )
    add(
        "--make-vocab-size-divisible-by",
        default=128,
        type=_whole(1),
        metavar="N",
        help="the vocabulary is padded with zero rows to a multiple of N; 1 adds none (default: %(default)s)",
    )
    add(
        "--seq-length",
        type=_whole(1),
        metavar="N",
        help="stored for training (default: the longest context of a Llama, 2048 for Mamba-2)",
    )
    _shared_options(parser)
    wide = parser.add_argument_group("wide streams (default: the ordinary model)")
    wide.add_argument(
        *("--num-streams", "--wide-residual"), dest="num_streams", type=_whole(2), metavar="K", help="widen on the way"
    )
    prefix = "--wide-residual-"
    for name, dest, metavar in (
        ("streamwise-sigmoid-init-scale", "init_scale", "SCALE"),
        ("retention-init", "retention_init", "G"),
        ("retention-max-forget", "max_forget", "F"),
    ):
        wide.add_argument(prefix + name, dest=dest, type=float, metavar=metavar, help="as in training")
    wide.add_argument(prefix + "learned-retention", dest="retention", action="store_true", help="as in training")


def export_options(parser: argparse.ArgumentParser) -> None:
    """Add what export-hf takes."""
    add = parser.add_argument
    add(*("--input", "--load"), required=True, metavar="DIR", type=Path, help="folder of checkpoints to read")
    add(*("--step", "--ckpt-step"), type=_whole(0), metavar="N", help="the step to read (default: the latest)")
    add("--output", required=True, metavar="DIR", type=Path, help="folder to make; it must not be there")
    add(
        "--like",
        metavar="DIR",
        type=Path,
        help="a Hugging Face folder to take the tokenizer and what else config.json says from (token ids and the like; "
        "default: what the checkpoint remembers of the folder that it was imported from)",
    )
    add("--vocab-size", type=_whole(1), metavar="N", help="rows of the vocabulary that are tokens (default: found)")
    add(
        "--max-shard-bytes",
        type=_whole(1),
        default=5_000_000_000,
        metavar="N",
        help="cut model.safetensors into files of at most N bytes (default: %(default)s)",
    )
    _shared_options(parser)


def _note(text: str) -> None:
    print(f"> {text}", file=sys.stderr, flush=True)


@contextmanager
def _quiet_host(verbose: bool) -> Iterator[Any]:
    """Yield the host, with what it and megatron print on standard error or nowhere."""
    from megatron.cpu.host import training_host

    with redirect_stdout(sys.stderr if verbose else io.StringIO()), training_host() as host:
        yield host


def _streams(args: argparse.Namespace) -> WideResidualConfig | None:
    from megatron.core.transformer.wide_residual_config import WideResidualConfig
    from megatron.training.checkpoints.errors import ConversionError

    given = {
        "streamwise_sigmoid_init_scale": args.init_scale,
        "learned_retention": args.retention or None,
        "retention_init": args.retention_init,
        "retention_max_forget": args.max_forget,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.num_streams is None:
        if given:
            raise ConversionError("flags of wide streams are given without --num-streams K: add it, or leave them out")
        return None
    if not args.retention and {"retention_init", "retention_max_forget"} & set(given):
        raise ConversionError(
            "retention bounds are given without --wide-residual-learned-retention; add it, or leave them out"
        )
    try:
        return WideResidualConfig(args.num_streams, **given)
    except (TypeError, ValueError) as error:
        raise ConversionError(str(error)) from error


def run_import(args: argparse.Namespace) -> int:
    """Make a checkpoint of a Hugging Face folder; returns the exit status."""
    from megatron.training.checkpoints.conversion import execute
    from megatron.training.checkpoints.output_folder import check_output, restore_replaced
    from megatron.training.huggingface.conversion import as_conversion, folder_reader
    from megatron.training.huggingface.folder_reader import HfFolder
    from megatron.training.huggingface.import_plan import plan_import

    if not args.dry_run:
        restore_replaced(args.output)
    check_output(args.output, args.overwrite, args.input)
    wide = _streams(args)
    with HfFolder.open(args.input) as folder:
        with _quiet_host(args.verbose) as host:
            imported = plan_import(
                folder,
                host,
                vocabulary_multiple=args.make_vocab_size_divisible_by,
                sequence_length=args.seq_length,
                wide=wide,
            )
            plan = as_conversion(imported, folder, args.format)
        if args.dry_run:
            print("\n".join(plan.lines()))
            return 0
        outcome = execute(plan, folder_reader(folder), args.output, overwrite=args.overwrite)
    for note in plan.notes:
        _note(note)
    _say(outcome)
    return _verify(args, args.input, args.output, None, plan.inexact) if args.verify else 0


def run_export(args: argparse.Namespace) -> int:
    """Make a Hugging Face folder of a checkpoint; returns the exit status."""
    from megatron.training.checkpoints.companions import weight_flaw_of
    from megatron.training.checkpoints.open_checkpoint import open_reader
    from megatron.training.checkpoints.output_folder import check_above, check_apart
    from megatron.training.huggingface.conversion import export_checkpoint, export_lines, plan_of_reader
    from megatron.training.huggingface.folder_writer import check_absent

    check_apart(args.output, args.input)
    check_above(args.output)
    check_absent(args.output)
    with open_reader(args.input, args.step, flaw_in=weight_flaw_of) as reader:
        with _quiet_host(args.verbose) as host:
            plan = plan_of_reader(reader, host, like=args.like, vocabulary=args.vocab_size)
        if args.dry_run:
            print("\n".join(export_lines(plan, args.input)))
            return 0
        if plan.tokenizer is None:
            _note("no tokenizer is copied: the checkpoint has none of Hugging Face's (--like FOLDER takes one)")
        outcome = export_checkpoint(plan, reader, args.output, max_shard_bytes=args.max_shard_bytes)
    _say(outcome)
    return _verify(args, args.output, args.input, args.step, None) if args.verify else 0


def _say(outcome: Outcome) -> None:
    _note(
        f"{outcome.folder}: {outcome.tensors} tensors, {outcome.nbytes:,} bytes; peak memory {outcome.peak_bytes:,} "
        f"bytes, largest layer {outcome.largest_layer:,} bytes"
    )


def _verify(args: argparse.Namespace, folder: Path, checkpoint: Path, step: int | None, inexact: str | None) -> int:
    from megatron.training.huggingface.verification import compare_with_folder

    difference, tolerance = compare_with_folder(folder, checkpoint, step)
    tolerance = tolerance if args.tolerance is None else args.tolerance
    accepted = difference.largest_relative <= tolerance
    verdict = "the same function" if accepted else "NOT the same function"
    print(f"{difference}; tolerance {tolerance:g}: {verdict}{'' if inexact is None else f' ({inexact})'}")
    return 0 if accepted else 1
