#!/usr/bin/env python3
"""Measures what replay of the residual stream costs: the step time of a wide GPT with it over the one without.

    python tools/benchmark_replay.py
    python tools/benchmark_replay.py --hidden-size 256 --tokens 512 --block-size auto 1 4 --json replay.json

A step is a forward and a backward of the whole model, without an optimizer. Every repetition times one step of each
model, so that a busy machine slows all of them; a ratio is formed within a repetition, and the table shows the median
and the range of the middle half. The ratio of CPU times stands beside it: other processes disturb it less. The ordinary
model of the same layers is timed too.

What always holds: the losses of the wide models are compared bit by bit before anything is timed; files are written
beside and renamed into place. Exit status: 0 done, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from benchmarking import (
    DTYPES,
    BenchmarkError,
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

AUTO = "auto"


@dataclass(frozen=True)
class Result:
    """One model: median seconds of a step, and its time (and CPU time) over that of the wide model without replay."""

    model: str
    block_size: int | None
    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_ratio: float


def _block_size(text: str) -> int | str:
    return AUTO if text == AUTO else positive(text)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argument_parser(
        "Measure the step time of a wide GPT with replay of the residual stream over the one without.",
        "python tools/benchmark_replay.py --hidden-size 256 --tokens 512 --block-size auto 1 4",
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--num-streams", type=positive, default=4, metavar="K", help="residual streams, 2 or more")
    shape.add_argument("--num-layers", type=positive, default=12, metavar="L", help="Transformer layers")
    shape.add_argument("--hidden-size", type=positive, default=512, metavar="D", help="width of a branch")
    shape.add_argument("--num-attention-heads", type=positive, default=8, metavar="H", help="heads; they divide D")
    shape.add_argument("--tokens", type=positive, default=1024, metavar="S", help="tokens of the one sequence")
    shape.add_argument("--vocab-size", type=positive, default=1024, metavar="V", help="size of the vocabulary")
    shape.add_argument("--dropout", action="store_true", help="with dropout of 0.1, as Megatron's default is")
    shape.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the parameters")
    shape.add_argument(
        "--block-size", type=_block_size, nargs="+", default=[AUTO], metavar="N", help='layers in a block, or "auto"'
    )
    add_run_arguments(parser, repeats=15, allocator="default")
    args = parse(parser, argv)
    if args.num_streams < 2:
        parser.error(f"argument --num-streams: {args.num_streams} is too few; 2 or more streams are wanted")
    if args.hidden_size % args.num_attention_heads:
        parser.error(f"argument --num-attention-heads: {args.num_attention_heads} do not divide {args.hidden_size}")
    for size in args.block_size:
        if size != AUTO and size > args.num_layers:
            parser.error(f"argument --block-size: {size} is more than the {args.num_layers} layers")
    return args


@contextlib.contextmanager
def megatron() -> Iterator[None]:
    """This machine as Megatron's host, one process."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.core import parallel_state
    from megatron.cpu.host import training_host

    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        backend = "nccl" if stack.enter_context(training_host()) == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        model_parallel_cuda_manual_seed(1)
        yield


def _ordinary_config(args: argparse.Namespace) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    dropout = 0.1 if args.dropout else 0.0
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        params_dtype=getattr(torch, DTYPES[args.dtype]),
        bf16=args.dtype == "bf16",
        # Without modules nothing but the stream is replayed; "selective" alone would mean core attention.
        recompute_granularity="selective",
        recompute_modules=[],
    )


def _seed(seed: int) -> None:
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def build_model(args: argparse.Namespace, num_streams: int | None, block_size: int | None) -> Any:
    """Build an ordinary GPT, a wide one, or with a block_size one that replays, all from one seed."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
    from megatron.core.models.gpt.wide_residual_layer_specs import widen_layer_spec
    from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config

    config, spec = _ordinary_config(args), get_gpt_layer_local_spec()
    model_class: type[GPTModel] = GPTModel
    if num_streams is not None:
        config = widen_transformer_config(
            config,
            WideResidualConfig(num_streams),
            recompute_residual_stream=block_size is not None,
            residual_stream_recompute_num_layers=block_size,
        )
        spec, model_class = widen_layer_spec(spec), WideResidualGPTModel
    _seed(1)
    model = model_class(config, spec, args.vocab_size, args.tokens)
    return model.to(config.params_dtype).to(torch.cuda.current_device()).train()


def step_of(model: Any, args: argparse.Namespace) -> Callable[[], float]:
    """Return a function that runs one step of the model on one batch and returns its loss."""
    import torch

    device = torch.cuda.current_device()
    generator = torch.Generator().manual_seed(1)
    tokens_bs = torch.randint(0, args.vocab_size, (1, args.tokens), generator=generator).to(device)
    positions_bs = torch.arange(args.tokens, device=device).expand_as(tokens_bs)
    mask = torch.ones(1, 1, args.tokens, args.tokens, dtype=torch.bool, device=device).triu(1)

    def step() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(tokens_bs, positions_bs, mask, labels=tokens_bs.roll(-1, 1)).float().mean()
        loss.backward()
        return loss.item()  # waits for a GPU's forward; the next step waits for its backward

    return step


def block_sizes(args: argparse.Namespace) -> list[int]:
    """The replay blocks to measure, without doubles; auto is what training would choose."""
    from megatron.training.stream_layout import stream_costs
    from megatron.training.stream_memory import StageLoad, best_block_size

    best = best_block_size([StageLoad(args.num_layers)], stream_costs(_ordinary_config(args), args.num_streams))
    return list(dict.fromkeys(best if size == AUTO else size for size in args.block_size))


def measure(args: argparse.Namespace) -> list[Result]:
    """Time every model, interleaved."""
    import torch

    wanted: list[tuple[str, int | None, int | None]] = [("ordinary", None, None), ("wide", args.num_streams, None)]
    wanted += [("replay", args.num_streams, size) for size in block_sizes(args)]
    steps = [step_of(build_model(args, streams, size), args) for _, streams, size in wanted]
    losses = []
    for step in steps[1:]:
        _seed(2)
        losses.append(step())
    if len(set(losses)) > 1:
        raise BenchmarkError(f"the wide models' losses differ: {losses}")
    names = [model if size is None else f"wide, replay N={size}" for model, _, size in wanted]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timings = interleave(dict(zip(names, steps, strict=True)), repeats=args.repeats, device=device)
    results = []
    for name, (model, _, size) in zip(names, wanted, strict=True):
        own, wide = timings[name], timings["wide"]
        ratio, cpu_ratio = spread(over(own.wall, wide.wall)), spread(over(own.cpu, wide.cpu)).median
        seconds = statistics.median(own.wall)
        results.append(Result(model, size, seconds, ratio.median, ratio.low, ratio.high, cpu_ratio))
    return results


def make_report(args: argparse.Namespace, results: list[Result]) -> Report:
    """The results as a table."""
    import torch

    title = f"{args.num_layers} layers, D={args.hidden_size}, {args.tokens} tokens, K={args.num_streams}, {args.dtype}"
    title += f"{', dropout' if args.dropout else ''}, {torch.get_num_threads()} threads, {args.repeats} repetitions"
    columns = [Column("model")]
    columns += [Column(name, right=True) for name in ("ms a step", "over wide", "middle half", "CPU time")]
    rows = []
    for result in results:
        name = result.model if result.block_size is None else f"wide, replay N={result.block_size}"
        middle_half = f"{result.ratio_low:.3f}-{result.ratio_high:.3f}"
        row = [name, f"{result.seconds * 1e3:.0f}", f"{result.ratio:.3f}", middle_half, f"{result.cpu_ratio:.3f}"]
        rows.append(row)
    return Report(title, columns, rows, machine_line(machine()))


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    prepare_process(args)
    with megatron():
        results = measure(args)
    report = make_report(args, results)
    report.print()
    write_outputs(args, [asdict(result) for result in results], [report])


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    return run_measurement(lambda: run(args))


if __name__ == "__main__":
    run_tool(main)
