#!/usr/bin/env python3
"""Measures what a run's logs cost: training steps that report the health of streams over steps that do not.

    python tools/benchmark_logging.py
    python tools/benchmark_logging.py --num-layers 2 --hidden-size 64 --seq-length 32 --json logging.json

A step is what the trainer does, forward to optimizer, of a wide GPT that the training script's code builds
(training_steps.py). Every repetition times one step of each case, interleaved; ratios are formed within a repetition.

    plain      a step that reports nothing; its hooks are there
    numbers    + the numbers of 50 rows, one of which every step has: TensorBoard files and an offline wandb run
    streams    + the health of the streams: sums over activations, factors, gradients, all its numbers to both
    pictures   + the heat maps, which every tenth report has

`of a step` is the cost at the default intervals, spread over the steps: numbers every step (a fiftieth of what is
timed, which would be too little to see), streams every 100 steps, pictures every 1,000.

What always holds: nothing leaves this machine; files are written beside and renamed into place. Exit status: 0 done, 2
bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from benchmarking import (
    Column,
    Report,
    add_run_arguments,
    argument_parser,
    interleave,
    machine,
    machine_line,
    over,
    parse,
    positive,
    prepare_process,
    run_measurement,
    spread,
    write_outputs,
)
from closed_pipe import run_tool

_NUMBERS = (
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "mem-reserved-bytes", "throughput"),
    *("mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count", "iteration-time"),
)
_ROWS = 50


@dataclass(frozen=True)
class Result:
    """One case: seconds of its step, its time over the plain one (pictures: over streams), and that cost per step of
    training."""

    case: str
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    every: int
    share_of_step: float
    cpu_share_of_step: float


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argument_parser(
        "Measure training steps that report numbers and the health of streams over steps that do not.",
        "python tools/benchmark_logging.py --num-layers 4 --hidden-size 256 --repeats 20",
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--num-streams", type=positive, default=4, metavar="K", help="residual streams, 2 or more")
    shape.add_argument("--num-layers", type=positive, default=6, metavar="L", help="Transformer layers")
    shape.add_argument("--hidden-size", type=positive, default=256, metavar="D", help="width of a branch")
    shape.add_argument("--head-dim", type=positive, default=32, metavar="N", help="features of an attention head")
    shape.add_argument("--seq-length", type=positive, default=512, metavar="S", help="tokens of a sequence")
    shape.add_argument("--micro-batch-size", type=positive, default=2, metavar="B", help="sequences of a step")
    add_run_arguments(parser, repeats=15)
    args = parse(parser, argv)
    if args.num_streams < 2:
        parser.error(f"argument --num-streams: {args.num_streams} is too few; 2 or more streams are wanted")
    if args.hidden_size % args.head_dim:
        parser.error(f"argument --head-dim: {args.head_dim} does not divide the hidden size {args.hidden_size}")
    return args


def _flags(args: argparse.Namespace) -> list[str]:
    return [
        *("--num-layers", str(args.num_layers), "--hidden-size", str(args.hidden_size)),
        *("--num-attention-heads", str(args.hidden_size // args.head_dim), "--seq-length", str(args.seq_length)),
        *("--max-position-embeddings", str(args.seq_length), "--micro-batch-size", str(args.micro_batch_size)),
        *("--global-batch-size", str(args.micro_batch_size), "--lr", "0.001", "--train-iters", "1000000"),
        *("--lr-decay-style", "constant", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1024"),
        *("--wide-residual", str(args.num_streams), "--attention-dropout", "0", "--hidden-dropout", "0"),
    ]


@contextlib.contextmanager
def run_writer(seq_length: int) -> Iterator[Any]:
    """A TensorBoard folder and an offline wandb run, both temporary, behind the writer that training has."""
    from megatron.training.run_logs.tensorboard_writer import RunWriter
    from megatron.training.run_logs.wandb_feed import WandbFeed
    from megatron.training.run_logs.wandb_session import SessionPlan

    with tempfile.TemporaryDirectory(prefix="benchmark-logging-") as folder:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")
        writer = RunWriter(f"{folder}/tensorboard", 1000, seq_length)
        writer.feed = WandbFeed(SessionPlan("benchmark", folder), None)
        try:
            yield writer
        finally:
            writer.close()
            writer.feed.finish()


def _cases(model: Any, writer: Any) -> dict[str, Callable[[], None]]:
    """The steps to time; each ends with what it logs."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    from megatron.training.stream_health import monitor

    args, count = model.args, 0
    monitor.attach_monitor(model.chunks, args=args)
    reporting = monitor.PATCHES[0].make(finalize_model_grads)
    for chunk in model.chunks:
        get_model_config(chunk).finalize_model_grads_func = reporting
    interval = args.log_streams_interval
    pictures = interval * monitor.REPORTS_PER_PICTURE

    def step(offset: int, rows: int) -> None:
        nonlocal count
        count += pictures
        args.curr_iteration = count + offset - 1  # the trainer's, counted from 0
        with contextlib.redirect_stdout(io.StringIO()):
            loss = model.step()
        first = args.curr_iteration + 1
        for row in range(rows):
            for name in _NUMBERS:
                writer.add_scalar(name, torch.tensor(loss) if name == "lm loss" else 1.0, first + row)

    return {
        "plain": lambda: step(1, 0),
        "numbers": lambda: step(1, _ROWS),
        "streams": lambda: step(2 * interval, 0),
        "pictures": lambda: step(interval, 0),
    }


def measure(args: argparse.Namespace) -> list[Result]:
    """Time the cases."""
    import megatron.training.global_vars as global_vars
    from training_steps import training_machine

    from megatron.cpu.replacements import Replacements
    from megatron.training.stream_health.monitor import REPORTS_PER_PICTURE

    with training_machine("gpt") as found, Replacements() as replaced, run_writer(args.seq_length) as writer:
        replaced.set(global_vars, "_GLOBAL_TENSORBOARD_WRITER", writer)
        model = found.build(_flags(args))
        interval = model.args.log_streams_interval
        timings = interleave(_cases(model, writer), repeats=args.repeats)
    every = {"plain": 1, "numbers": 1, "streams": interval, "pictures": interval * REPORTS_PER_PICTURE}
    times = {"plain": 1, "numbers": _ROWS, "streams": 1, "pictures": 1}
    results = []
    for case, timing in timings.items():
        others = timings["streams" if case == "pictures" else "plain"]
        ratio = spread(over(timing.wall, others.wall))
        shares = [
            spread([(one - other) / step for one, other, step in zip(own, without, plain, strict=True)]).median
            for own, without, plain in (
                (timing.wall, others.wall, timings["plain"].wall),
                (timing.cpu, others.cpu, timings["plain"].cpu),
            )
        ]
        of_step, of_cpu = (share / every[case] / times[case] for share in shares)
        seconds = spread(timing.wall).median
        results.append(Result(case, seconds, ratio.median, ratio.low, ratio.high, every[case], of_step, of_cpu))
    return results


def report(args: argparse.Namespace, results: list[Result]) -> Report:
    """The table."""
    rows = []
    for result in results:
        row = [result.case, f"{result.seconds * 1e3:.1f}", f"{result.ratio:.3f}"]
        row += [f"{result.ratio_low:.3f}-{result.ratio_high:.3f}", f"{result.every:,}"]
        shares = (result.share_of_step, result.cpu_share_of_step)
        rows.append(row + [f"{share:.3%}" if result.case != "plain" else "" for share in shares])
    columns = [Column("case")]
    names = ("ms a step", "over plain", "middle half", "every ... steps", "of a step", "of its CPU time")
    columns += [Column(name, right=True) for name in names]
    title = (
        f"wide GPT, K={args.num_streams}, {args.num_layers} layers, D={args.hidden_size}, "
        f"{args.micro_batch_size}x{args.seq_length} tokens, {args.repeats} repetitions"
    )
    return Report(title, columns, rows, machine_line(machine()))


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)

    def run() -> None:
        prepare_process(args)
        results = measure(args)
        table = report(args, results)
        table.print()
        found = {"machine": machine(), "results": [asdict(result) for result in results]}
        write_outputs(args, found, [table])

    return run_measurement(run)


if __name__ == "__main__":
    run_tool(main)
