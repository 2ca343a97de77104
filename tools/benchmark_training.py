#!/usr/bin/env python3
"""Measures whole training steps of wide models over those of the ordinary model, beside what memory traffic explains.

    python tools/benchmark_training.py
    python tools/benchmark_training.py --num-layers 2 --hidden-size 256 512 1024 2048 --plot overhead.png
    python tools/benchmark_training.py --model hybrid --num-streams 2 4 --replay both --json hybrid.json
    python tools/benchmark_training.py --dtype bf16 -- --hidden-dropout 0.1 --transformer-impl transformer_engine

A step is what the trainer does: gradients to zero, forward, backward, optimizer (training_steps.py builds the models by
the code of the training scripts). For each width, all models are in memory, and every repetition times one step of each
and one copy of 64 MiB. Ratios are formed within a repetition.

`bound` is what the streams cost by their traffic alone: the bytes that one read and one write per branch move and the
ordinary model does not, over the copy bandwidth of the same repetition. `of bound` is the measured extra time over it,
and `95%` the range that holds its true median with this confidence: wide on a busy machine, narrower with more
`--repeats`. Memory is the peak that PyTorch's allocator counts in one step, parameters, gradients and optimizer state
included. docs/performance.md has the arithmetic.

What always holds: nothing is measured before the arguments have been checked; files are written beside and renamed into
place. Exit status: 0 done, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from benchmarking import (
    BenchmarkError,
    Column,
    Report,
    Timings,
    add_run_arguments,
    argument_parser,
    interleave,
    machine,
    machine_line,
    median_interval,
    over,
    parse,
    positive,
    prepare_process,
    run_measurement,
    spread,
    write_outputs,
    written_beside,
)
from closed_pipe import run_tool

if TYPE_CHECKING:
    from training_steps import TrainingModel

REPLAY_FLAGS = ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
REPLAY_FLAGS += ["--residual-stream-recompute-num-layers", "auto"]
COPY_BYTES = 64 << 20
HYBRID_PATTERN = "M-M-*-M-M-*-"


@dataclass(frozen=True)
class Variant:
    """A model of one width: ordinary without streams."""

    num_streams: int | None
    replay: bool = False

    @property
    def name(self) -> str:
        """As the tables call it."""
        if self.num_streams is None:
            return "ordinary"
        return f"wide K={self.num_streams}" + (", replay" if self.replay else "")


@dataclass(frozen=True)
class Result:
    """One model's step. Ratios are over the ordinary model of the same width, extra and bound in seconds.

    `of_bound_low` and `of_bound_high` hold the true median of the extra time over the bound with 95 % confidence;
    `seconds_each` has every repetition, in the same order for all models.
    """

    model: str
    hidden_size: int
    num_streams: int | None
    replay: bool
    seconds: float
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float
    extra_seconds: float
    bound_seconds: float
    of_bound: float | None
    of_bound_low: float | None
    of_bound_high: float | None
    peak_bytes: int | None
    peak_ratio: float | None
    loss: float
    seconds_each: list[float]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argument_parser(
        "Measure training steps of wide models over those of the ordinary one. Flags behind -- go to Megatron.",
        "python tools/benchmark_training.py --num-streams 2 4 --hidden-size 256 1024 --num-layers 4",
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--model", choices=("gpt", "hybrid"), default="gpt", help="kind of model")
    shape.add_argument("--num-streams", type=positive, nargs="+", default=[4], metavar="K", help="streams, 2 or more")
    shape.add_argument("--replay", choices=("off", "on", "both"), default="both", help="replay of the stream")
    shape.add_argument("--num-layers", type=positive, default=12, metavar="L", help="layers of the GPT")
    shape.add_argument(
        "--hybrid-layer-pattern",
        default=HYBRID_PATTERN,
        metavar="PATTERN",
        help="layers of the hybrid: M Mamba, * attention, - MLP",
    )
    shape.add_argument("--hidden-size", type=positive, nargs="+", default=[512], metavar="D", help="widths of a branch")
    shape.add_argument("--head-dim", type=positive, default=64, metavar="N", help="features of an attention head")
    shape.add_argument("--seq-length", type=positive, default=512, metavar="S", help="tokens of a sequence")
    shape.add_argument("--micro-batch-size", type=positive, default=1, metavar="B", help="sequences of a step")
    shape.add_argument("--vocab-size", type=positive, default=1024, metavar="V", help="size of the vocabulary")
    shape.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the parameters")
    run = add_run_arguments(parser, repeats=21, allocator="keep", plot=True)
    run.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", default=[], help="flags of Megatron's, for all models")
    args = parse(parser, argv)
    for streams in args.num_streams:
        if streams < 2:
            parser.error(f"argument --num-streams: {streams} is too few; 2 or more streams are wanted")
    for width in args.hidden_size:
        if width % args.head_dim:
            parser.error(f"argument --head-dim: {args.head_dim} does not divide the hidden size {width}")
    if set(args.hybrid_layer_pattern) - set("M*-"):
        parser.error(f"argument --hybrid-layer-pattern: M, * and - are wanted, got {args.hybrid_layer_pattern!r}")
    return args


def megatron_flags(args: argparse.Namespace, width: int, variant: Variant) -> list[str]:
    """The flags that pretrain_gpt.py or pretrain_mamba.py would be given."""
    options: dict[str, Any] = {
        "hidden-size": width,
        "num-attention-heads": width // args.head_dim,
        "seq-length": args.seq_length,
        "max-position-embeddings": args.seq_length,
        "micro-batch-size": args.micro_batch_size,
        "global-batch-size": args.micro_batch_size,
        "vocab-size": args.vocab_size,
        "train-iters": 1000,
        "lr": 1e-4,
        "hidden-dropout": 0.0,
        "attention-dropout": 0.0,
    }
    if args.model == "gpt":
        options["num-layers"] = args.num_layers
    else:
        options |= {"hybrid-layer-pattern": args.hybrid_layer_pattern, "mamba-head-dim": args.head_dim}
        options |= {"mamba-state-dim": 64, "mamba-num-groups": 1}
    if variant.num_streams is not None:
        options["wide-residual"] = variant.num_streams
    flags = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    return [
        *flags,
        *(["--bf16"] if args.dtype == "bf16" else []),
        *(REPLAY_FLAGS if variant.replay else []),
        *args.flags,
    ]


def extra_units(num_streams: int, layers: list[int], *, replay: bool) -> int:
    """Elements per token, in units of D, that a wide model moves and the ordinary one does not.

    `layers` has each layer's number of branches. Every branch reads and writes once, forward and backward, each as if
    by itself and without additions of gradients, whatever kernels do in one pass. Docs: performance.md.
    """
    k, units = num_streams, 0
    for branches in layers:
        forward = branches * ((k + 1) + (2 * k + 1))
        backward = branches * ((2 * k + 1) + (k + 2))
        units += forward + backward - 6 * branches  # an addition, forward and backward, per ordinary branch
        units += (forward - (2 * k + 1)) if replay else 0
    expand = (k + 1) + (k + 1)
    readout = (k + 1) + (2 * k + 1)
    return units + expand + readout


def branches_of_layers(args: argparse.Namespace) -> list[int]:
    """The number of residual branches of every layer."""
    return [2] * args.num_layers if args.model == "gpt" else [1] * len(args.hybrid_layer_pattern)


def variants(args: argparse.Namespace) -> list[Variant]:
    """The models of one width, the ordinary one first."""
    replays = {"off": [False], "on": [True], "both": [False, True]}[args.replay]
    return [Variant(None), *(Variant(k, replay) for k in dict.fromkeys(args.num_streams) for replay in replays)]


def measure(args: argparse.Namespace) -> Iterator[tuple[int, list[Result], float]]:
    """For each width: the width, its results, and the copy bandwidth in bytes per second."""
    from training_steps import training_machine

    from megatron.training.local_defaults import LocalChoiceError

    with training_machine(args.model) as host:
        for width in dict.fromkeys(args.hidden_size):
            try:
                models = {v: host.build(megatron_flags(args, width, v)) for v in variants(args)}
            except (LocalChoiceError, AssertionError) as error:
                raise BenchmarkError(str(error) or "Megatron refuses these flags") from error
            yield width, *_measure_width(args, width, models, host.host)


def _measure_width(
    args: argparse.Namespace, width: int, models: dict[Variant, TrainingModel], device: str
) -> tuple[list[Result], float]:
    import torch

    source = torch.ones(COPY_BYTES // 4, device=torch.cuda.current_device())
    target = torch.empty_like(source)
    losses = {variant: model.step() for variant, model in models.items()}
    cases: dict[str, Any] = {variant.name: model.step for variant, model in models.items()}
    timings = interleave(
        {**cases, "copy": lambda: target.copy_(source)}, repeats=args.repeats, warm_up=2, device=device
    )
    rates = [2 * COPY_BYTES / seconds for seconds in timings["copy"].wall]
    peaks = {} if args.no_memory else {variant: model.peak_bytes() for variant, model in models.items()}
    results = [_result(args, width, variant, timings, rates, peaks, losses[variant]) for variant in models]
    return results, statistics.median(rates)


def _result(
    args: argparse.Namespace,
    width: int,
    variant: Variant,
    timings: dict[str, Timings],
    rates: list[float],
    peaks: dict[Variant, int],
    loss: float,
) -> Result:
    tokens = args.seq_length * args.micro_batch_size
    own, ordinary = timings[variant.name], timings["ordinary"]
    ratio = spread(over(own.wall, ordinary.wall))
    extra = [mine - theirs for mine, theirs in zip(own.wall, ordinary.wall, strict=True)]
    bound = 0.0
    if variant.num_streams is not None:
        units = extra_units(variant.num_streams, branches_of_layers(args), replay=variant.replay)
        bytes_moved = units * tokens * width * (4 if args.dtype == "fp32" else 2)
        bound = statistics.median(bytes_moved / rate for rate in rates)
    extra_seconds, (extra_low, extra_high) = statistics.median(extra), median_interval(extra)
    seconds = statistics.median(own.wall)
    peak = peaks.get(variant)
    return Result(
        model=variant.name,
        hidden_size=width,
        num_streams=variant.num_streams,
        replay=variant.replay,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        cpu_ratio=statistics.median(over(own.cpu, ordinary.cpu)),
        extra_seconds=extra_seconds,
        bound_seconds=bound,
        of_bound=extra_seconds / bound if bound else None,
        of_bound_low=extra_low / bound if bound else None,
        of_bound_high=extra_high / bound if bound else None,
        peak_bytes=peak,
        peak_ratio=None if peak is None else peak / peaks[Variant(None)],
        loss=loss,
        seconds_each=own.wall,
    )


def make_report(args: argparse.Namespace, results: list[Result], rates: dict[int, float]) -> Report:
    """The results as a table."""
    names = ["model", "D", "ms a step", "tokens/s", "over ordinary", "middle half", "CPU time"]
    names += ["extra ms", "bound ms", "of bound", "95%", "peak MiB", "over ordinary"]
    rows = []
    for result in results:
        ratio = f"{result.ratio:.3f}", f"{result.ratio_low:.3f}-{result.ratio_high:.3f}"
        row = [result.model, str(result.hidden_size), f"{result.seconds * 1e3:.0f}", f"{result.tokens_per_second:.0f}"]
        row += [*ratio, f"{result.cpu_ratio:.3f}"]
        is_wide = result.num_streams is not None
        row += [f"{result.extra_seconds * 1e3:.1f}", f"{result.bound_seconds * 1e3:.1f}"] if is_wide else ["", ""]
        row += [f"{result.of_bound:.2f}", _between(result.of_bound_low, result.of_bound_high)] if is_wide else ["", ""]
        peak = result.peak_bytes is not None and result.peak_ratio is not None
        row += [f"{(result.peak_bytes or 0) / 2**20:.0f}", f"{result.peak_ratio or 0:.3f}"] if peak else ["", ""]
        rows.append(row)
    layers = f"{args.num_layers} layers" if args.model == "gpt" else args.hybrid_layer_pattern
    copies = ", ".join(f"{rate / 1e9:.1f} GB/s (D={width})" for width, rate in rates.items())
    return Report(
        f"{args.model}, {layers}, {args.micro_batch_size} x {args.seq_length} tokens, {args.dtype}, {args.repeats} "
        "repetitions",
        [Column(name, right=index > 0) for index, name in enumerate(names)],
        rows,
        f"copy: {copies}; {machine_line(machine())}",
    )


def _between(low: float | None, high: float | None) -> str:
    return f"{low:.2f} to {high:.2f}"


def draw(results: list[Result], path: Path) -> None:
    """Draw the overhead over the width, measured and as the bound says, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds = {result.hidden_size: result.seconds for result in results if result.num_streams is None}
    figure, axis = pyplot.subplots(figsize=(6.5, 4), layout="constrained")
    for index, name in enumerate(dict.fromkeys(r.model for r in results if r.num_streams is not None)):
        own = [result for result in results if result.model == name]
        widths = [result.hidden_size for result in own]
        below = [100 * (result.ratio - result.ratio_low) for result in own]
        above = [100 * (result.ratio_high - result.ratio) for result in own]
        measured = [100 * (result.ratio - 1) for result in own]
        axis.errorbar(widths, measured, [below, above], marker="o", capsize=3, color=f"C{index}", label=name)
        bound = [100 * result.bound_seconds / seconds[result.hidden_size] for result in own]
        axis.plot(widths, bound, linestyle="--", color=f"C{index}")
    axis.plot([], [], linestyle="--", color="gray", label="bound by memory traffic")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(seconds), [str(width) for width in sorted(seconds)])
    axis.set_xlabel("branch width D")
    axis.set_ylabel("step time over ordinary, %")
    axis.axhline(0, color="black", linewidth=0.8)
    axis.legend()
    with written_beside(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    prepare_process(args)
    results: list[Result] = []
    rates: dict[int, float] = {}
    for width, of_width, rate in measure(args):
        results += of_width
        rates[width] = rate
    report = make_report(args, results, rates)
    report.print()
    write_outputs(args, {"machine": machine(), "results": [asdict(result) for result in results]}, [report])
    if args.plot:
        draw(results, args.plot)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    return run_measurement(lambda: run(args))


if __name__ == "__main__":
    run_tool(main)
