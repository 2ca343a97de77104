#!/usr/bin/env python3
"""Measures what replay of the residual stream costs: the step time of a wide GPT with it over the one without.

    python tools/benchmark_replay.py
    python tools/benchmark_replay.py --hidden-size 256 --tokens 512 --block-size auto 1 4 --json replay.json

A step is a forward and a backward of the whole model, without an optimizer. Every repetition times one step of each
model, so that a busy machine slows all of them; a ratio is formed within a repetition, and the table shows the median
and the range of the middle half. The ratio of CPU times stands beside it: other processes disturb it less. The ordinary
model of the same layers is timed too.

What always holds: the losses of the wide models are compared bit by bit before anything is timed; --json is written
beside and renamed into place. Exit status: 0 done, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from quiet_imports import quiet_imports

AUTO = "auto"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
WARM_UP_STEPS = 2


class BenchmarkError(Exception):
    """What was asked for cannot be measured here."""


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


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, got {text!r}")
    return value


def _block_size(text: str) -> int | str:
    return AUTO if text == AUTO else _positive(text)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argparse.ArgumentParser(
        description="Measure the step time of a wide GPT with replay of the residual stream over the one without.",
        epilog="Example: benchmark_replay.py --hidden-size 256 --tokens 512 --block-size auto 1 4",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--num-streams", type=_positive, default=4, metavar="K", help="residual streams, 2 or more")
    shape.add_argument("--num-layers", type=_positive, default=12, metavar="L", help="Transformer layers")
    shape.add_argument("--hidden-size", type=_positive, default=512, metavar="D", help="width of a branch")
    shape.add_argument("--num-attention-heads", type=_positive, default=8, metavar="H", help="heads; they divide D")
    shape.add_argument("--tokens", type=_positive, default=1024, metavar="S", help="tokens of the one sequence")
    shape.add_argument("--vocab-size", type=_positive, default=1024, metavar="V", help="size of the vocabulary")
    shape.add_argument("--dropout", action="store_true", help="with dropout of 0.1, as Megatron's default is")
    shape.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="dtype of the parameters")
    shape.add_argument(
        "--block-size", type=_block_size, nargs="+", default=[AUTO], metavar="N", help='layers in a block, or "auto"'
    )
    run = parser.add_argument_group("how")
    run.add_argument("--repeats", type=_positive, default=15, metavar="N", help="interleaved repetitions")
    run.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    run.add_argument(
        "--allocator",
        choices=("keep", "default"),
        default="default",
        help="leave malloc as it is, as training does, or keep freed memory in the process (megatron/cpu/allocator.py)",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE (default: no file)")
    args = parser.parse_args(argv)
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"argument --json: the folder {args.json.resolve().parent} does not exist")
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
    seconds: list[list[float]] = [[] for _ in steps]
    cpu_seconds: list[list[float]] = [[] for _ in steps]
    for repetition in range(WARM_UP_STEPS + args.repeats):
        # Each repetition begins with another model, so that none always follows the same neighbour.
        for turn in range(len(steps)):
            index = (repetition + turn) % len(steps)
            start, cpu_start = time.perf_counter(), time.process_time()
            steps[index]()
            torch.cuda.synchronize()
            if repetition >= WARM_UP_STEPS:
                seconds[index].append(time.perf_counter() - start)
                cpu_seconds[index].append(time.process_time() - cpu_start)
    results = []
    for (model, _, size), own, own_cpu in zip(wanted, seconds, cpu_seconds, strict=True):
        ratios = _over(own, seconds[1])
        low, high = _middle_half(ratios)
        cpu_ratio = statistics.median(_over(own_cpu, cpu_seconds[1]))
        results.append(Result(model, size, statistics.median(own), statistics.median(ratios), low, high, cpu_ratio))
    return results


def _over(values: list[float], others: list[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _middle_half(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def print_table(args: argparse.Namespace, results: list[Result]) -> None:
    """The results as a table on stdout."""
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{args.num_layers} layers, D={args.hidden_size}, {args.tokens} tokens, K={args.num_streams}, "
        f"{args.dtype}{', dropout' if args.dropout else ''}, {torch.get_num_threads()} threads, {args.repeats} "
        "repetitions"
    )
    table.add_column("model", no_wrap=True)
    for column in ("ms a step", "over wide", "middle half", "CPU time"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        name = result.model if result.block_size is None else f"wide, replay N={result.block_size}"
        spread = f"{result.ratio_low:.3f}-{result.ratio_high:.3f}"
        table.add_row(name, f"{result.seconds * 1e3:.0f}", f"{result.ratio:.3f}", spread, f"{result.cpu_ratio:.3f}")
    Console().print(table)


def write_json(path: Path, results: list[Result]) -> None:
    """Write the results beside `path` and rename them into place."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        with quiet_imports():
            import torch

            from megatron.cpu.allocator import keep_freed_memory

            if args.threads:
                torch.set_num_threads(args.threads)
            if args.allocator == "keep" and not keep_freed_memory():
                raise BenchmarkError("--allocator keep: this C library has no mallopt; leave it out")
            with megatron():
                results = measure(args)
        print_table(args, results)
        if args.json:
            write_json(args.json, results)
    except (BenchmarkError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
