#!/usr/bin/env python3
"""How fast Mamba-2's PyTorch operators are, against the slow path of Hugging Face transformers, and how much they hold.

    python tools/benchmark_mamba.py                                   # length 1024, memory at 512 1024 2048 4096
    python tools/benchmark_mamba.py --length 2048 --dtype bf16 --threads 1 --json mamba.json

Measured is what a mixer does between its two projections: short convolution, selective scan, gate and gated norm, on
the same inputs and weights. Hugging Face's Mamba2Mixer runs its own code with both projections taken out, once per
chunk size of --hf-chunk-size; ours runs mamba_split_conv1d_scan_combined and the gated norm. Before anything is timed,
outputs and gradients of the two are compared. Repetitions are interleaved, so that a busy machine is busy for all.

Memory is the peak of what one forward and backward allocates beyond inputs and weights, as PyTorch's allocators count.

What always holds: nothing is measured before the arguments have been checked; files are written beside and renamed into
place. Exit status: 0 done, 2 bad arguments or results that disagree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    peak_rise,
    positive,
    prepare_process,
    run_measurement,
    write_outputs,
)
from closed_pipe import run_tool

if TYPE_CHECKING:
    import torch

TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2}  # of the largest element
OURS = "ours"


@dataclass(frozen=True)
class Case:
    """One implementation: from the inputs of the scan, all of which need gradients, to its output [b, l, h p]."""

    name: str
    run: Callable[[], torch.Tensor]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argument_parser(
        "Time Mamba-2's PyTorch operators against Hugging Face's slow path, and measure their memory.",
        "python tools/benchmark_mamba.py --length 2048 --dtype bf16 --threads 1",
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences")
    shape.add_argument("--length", type=positive, default=1024, metavar="N", help="tokens of a sequence")
    shape.add_argument("--heads", type=positive, default=16, metavar="N", help="heads")
    shape.add_argument("--head-dim", type=positive, default=64, metavar="N", help="features of a head")
    shape.add_argument("--groups", type=positive, default=1, metavar="N", help="groups of heads that share B and C")
    shape.add_argument("--state-dim", type=positive, default=128, metavar="N", help="size of a head's state")
    shape.add_argument("--dtype", choices=sorted(TOLERANCES), default="fp32", help="dtype of inputs and weights")
    shape.add_argument(
        "--hf-chunk-size",
        nargs="+",
        type=positive,
        default=[64, 128, 256],
        metavar="N",
        help="chunk sizes that Hugging Face's path is run with; 256 is its own default",
    )
    shape.add_argument(
        "--memory-lengths",
        nargs="*",
        type=positive,
        default=[512, 1024, 2048, 4096],
        metavar="N",
        help="lengths whose memory is measured; give none to leave this out",
    )
    add_run_arguments(parser, repeats=7, device=True)
    args = parse(parser, argv)
    if args.heads % args.groups:
        parser.error(f"argument --groups: {args.heads} heads cannot be shared out to {args.groups} groups")
    return args


def build_mixer(args: argparse.Namespace) -> Any:
    """Hugging Face's mixer without its projections, with weights as a trained model might have them."""
    import torch
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=args.heads * args.head_dim,
        expand=1,
        num_heads=args.heads,
        head_dim=args.head_dim,
        n_groups=args.groups,
        state_size=args.state_dim,
        num_hidden_layers=1,
    )
    torch.manual_seed(1)
    mixer: Any = Mamba2Mixer(config, layer_idx=0)
    mixer.in_proj, mixer.out_proj = torch.nn.Identity(), torch.nn.Identity()
    return mixer.to(args.device, getattr(torch, DTYPES[args.dtype])).eval()  # eval(): never asks for fused kernels


def build_inputs(args: argparse.Namespace, length: int) -> torch.Tensor:
    """The input projection's output [b, l, 2 h p + 2 g n + h]."""
    import torch

    width = 2 * args.heads * args.head_dim + 2 * args.groups * args.state_dim + args.heads
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(args.batch, length, width, generator=generator)
    return values.to(args.device, getattr(torch, DTYPES[args.dtype])).requires_grad_()


def hugging_face_case(mixer: Any, chunk_size: int, zxbcdt: torch.Tensor) -> Case:
    """Hugging Face's path with one chunk size."""

    def run() -> torch.Tensor:
        mixer.chunk_size = chunk_size
        return mixer(zxbcdt)

    return Case(f"hf, chunk {chunk_size}", run)


def our_case(mixer: Any, zxbcdt: torch.Tensor) -> Case:
    """Our operators with the mixer's weights."""
    from megatron.core.ssm.torch_mamba_scan import mamba_split_conv1d_scan_combined

    def run() -> torch.Tensor:
        y = mamba_split_conv1d_scan_combined(
            zxbcdt,
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            mixer.dt_bias,
            -mixer.A_log.float().exp(),
            mixer.D,
            chunk_size=mixer.chunk_size,
            rmsnorm_weight=mixer.norm.weight,
            rmsnorm_eps=mixer.norm.variance_epsilon,
            headdim=mixer.head_dim,
            ngroups=mixer.n_groups,
            norm_before_gate=False,
        )
        assert not isinstance(y, tuple)
        return y

    return Case(OURS, run)


def differentiated(mixer: Any, zxbcdt: torch.Tensor) -> list[torch.Tensor]:
    """The inputs and weights whose gradients a backward computes."""
    return [zxbcdt, *mixer.parameters()]


def check_agreement(args: argparse.Namespace, cases: list[Case], inputs: list[torch.Tensor]) -> None:
    """BenchmarkError unless every case gives the output and the gradients of the first."""
    import torch

    wanted: list[torch.Tensor] | None = None
    for case in cases:
        y = case.run()
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(y.shape, generator=generator).to(y)
        found = [y, *torch.autograd.grad(y, inputs, weights)]
        if wanted is None:
            wanted = found
            continue
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            error = ((one - other).abs().max() / one.abs().max().clamp(min=1e-6)).item()
            if not error <= TOLERANCES[args.dtype]:
                what = "output" if index == 0 else f"gradient {index}"
                raise BenchmarkError(f"{what} of {case.name!r} differs from {cases[0].name!r} by {error:.1e}")


def measure_speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per case: median seconds of a forward (without a graph) and of a training step's two passes."""
    import torch

    mixer = build_mixer(args)
    zxbcdt = build_inputs(args, args.length)
    inputs = differentiated(mixer, zxbcdt)
    cases = [our_case(mixer, zxbcdt)]
    cases += [hugging_face_case(mixer, size, zxbcdt) for size in dict.fromkeys(args.hf_chunk_size)]
    check_agreement(args, cases, inputs)

    def forward(case: Case) -> torch.Tensor:
        with torch.no_grad():
            return case.run()

    def both(case: Case) -> tuple[torch.Tensor, ...]:
        y = case.run()
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    passes = {f"{case.name} {run.__name__}": partial(run, case) for case in cases for run in (forward, both)}
    timings = interleave(passes, repeats=args.repeats, warm_up=1, device=args.device)
    seconds = {name: measured.wall for name, measured in timings.items()}
    return [
        {
            "case": case.name,
            "length": args.length,
            "dtype": args.dtype,
            "forward_seconds": statistics.median(seconds[f"{case.name} forward"]),
            "forward_backward_seconds": statistics.median(seconds[f"{case.name} both"]),
            "speedup_over_it": statistics.median(over(seconds[f"{case.name} both"], seconds[f"{OURS} both"])),
        }
        for case in cases
    ]


def measure_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per length: bytes that one forward and backward adds, for ours and for Hugging Face's path."""
    import torch

    mixer = build_mixer(args)
    records = []
    for length in sorted(set(args.memory_lengths)):
        zxbcdt = build_inputs(args, length)
        inputs = differentiated(mixer, zxbcdt)
        record: dict[str, Any] = {"length": length, "dtype": args.dtype}
        for name, case in (
            ("our_bytes", our_case(mixer, zxbcdt)),
            ("hf_bytes", hugging_face_case(mixer, max(args.hf_chunk_size), zxbcdt)),
        ):

            def step(case: Case = case, inputs: list[torch.Tensor] = inputs) -> None:
                y = case.run()
                torch.autograd.grad(y, inputs, torch.ones_like(y))

            record[name] = peak_rise(step, args.device)
        records.append(record)
    return records


def make_reports(args: argparse.Namespace, speed: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[Report]:
    """The results as tables."""
    import torch

    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    shape = f"batch {args.batch}, {args.heads} heads of {args.head_dim}, {args.groups} groups, state {args.state_dim}"
    columns = [Column("case")]
    columns += [Column(name, right=True) for name in ("forward ms", "forward+backward ms", "against ours")]
    rows = [
        [
            record["case"],
            f"{record['forward_seconds'] * 1e3:.1f}",
            f"{record['forward_backward_seconds'] * 1e3:.1f}",
            f"{record['speedup_over_it']:.2f}",
        ]
        for record in speed
    ]
    title = f"length {args.length}, {shape}, {args.dtype}, {where}, {args.repeats} repetitions"
    note = "the last column: forward and backward, as many times as slow as ours; " + machine_line(machine())
    reports = [Report(title, columns, rows, note)]
    if not memory:
        return reports
    hf = f"hf, chunk {max(args.hf_chunk_size)}"
    names = ("length", "ours MiB", "ours KiB/token", f"{hf} MiB", f"{hf} KiB/token")
    rows = []
    for record in memory:
        ours, theirs, tokens = record["our_bytes"], record["hf_bytes"], record["length"] * args.batch
        row = [str(record["length"]), f"{ours / 2**20:.0f}", f"{ours / tokens / 1024:.1f}"]
        rows.append([*row, f"{theirs / 2**20:.0f}", f"{theirs / tokens / 1024:.1f}"])
    title = f"peak of one forward and backward, {shape}, {args.dtype}"
    return [*reports, Report(title, [Column(name, right=True) for name in names], rows)]


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    import transformers

    from megatron.cpu.allocator import keep_freed_memory

    transformers.logging.set_verbosity_error()  # its notes that it runs the slow path: that is what we measure
    prepare_process(args)
    memory = measure_memory(args)
    if args.device == "cpu":
        keep_freed_memory()  # from here on the resident memory says nothing
    speed = measure_speed(args)
    reports = make_reports(args, speed, memory)
    for report in reports:
        report.print()
    write_outputs(args, {"speed": speed, "memory": memory}, reports)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts bytes says on stderr when it starts
    return run_measurement(lambda: run(args))


if __name__ == "__main__":
    run_tool(main)
