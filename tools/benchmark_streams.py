#!/usr/bin/env python3
"""Measures the streamwise operators against this machine's copy bandwidth, plain PyTorch and hyper-connections.

    python tools/benchmark_streams.py
    python tools/benchmark_streams.py --num-streams 2 4 8 --hidden-size 512 2048 --dtype bf16 --json streams.json
    python tools/benchmark_streams.py --backend naive compiled --retention --no-steps

Every repetition times one copy of a wide stream into memory that exists, and every operation, so that a busy machine
slows all of them. An operation's fraction is its bytes per second over those of the copy of the same repetition; the
table shows the median and the range of the middle half, and how many times as fast as other ways each is. Operators are
called as a model calls them and allocate their results.

Bytes moved per token, in units of D elements (K streams):

    copy                2K      reads X, writes a copy
    read        forward K + 1   reads X; writes z
    read       backward 2K + 1  reads X, gZ; writes dX
    write       forward 2K + 1  reads X, u; writes Y
    write      backward K + 2   reads gY, u; writes du (dX is gY itself)
      with retention    3K + 2  reads gY, u, X; writes du, dX
    write_read  forward 2K + 2  reads X, u; writes Y, z
    write_read backward 3K + 3  reads gY, gZ, X, u; writes dX, du
      with a norm as without    --norm: "read RMSNorm" is one operation, "read then RMSNorm" the read and the module,
      then a norm   + 2, + 3    which reads z, writes n; reads gN, z, writes gZ. `x apart`: how many times as fast
    step           both 9K + 5  a read, an identity branch and a write, forward and backward

Backends: naive is the einsum and broadcast formula, inductor the same under torch.compile, the others are those of
MEGATRON_STREAMWISE_BACKEND. Steps are also those of the PyPI package hyper-connections (stream_cases.py), where it is
installed: .venv/bin/pip install -c constraints.txt -e '.[benchmarks]'.

What always holds: nothing is measured before the arguments have been checked; files are written beside and renamed into
place. Exit status: 0 done, 2 bad arguments or a backend that this machine cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Iterator
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
    positive,
    prepare_process,
    run_measurement,
    spread,
    write_outputs,
)
from closed_pipe import run_tool

if TYPE_CHECKING:
    from stream_cases import Case, Shape

BACKENDS = ("naive", "inductor", "eager", "compiled", "triton")
PACKAGE = "hyper-connections"
INSTALL = ".venv/bin/pip install -c constraints.txt -e '.[benchmarks]'"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argument_parser(
        "Measure the streamwise operators' forward and backward as fractions of the copy bandwidth.",
        "python tools/benchmark_streams.py --num-streams 2 4 8 --dtype bf16 --retention",
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--num-streams", type=positive, nargs="+", default=[4], metavar="K", help="residual streams")
    shape.add_argument("--hidden-size", type=positive, nargs="+", default=[1024], metavar="D", help="width of a branch")
    shape.add_argument("--tokens", type=positive, nargs="+", default=[4096], metavar="N", help="tokens per call")
    shape.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"], help="dtypes of X and u")
    shape.add_argument("--retention", action="store_true", help="also measure the write with learned retention")
    shape.add_argument(
        "--norm",
        nargs="+",
        choices=("LayerNorm", "RMSNorm"),
        default=[],
        help="also measure reads with this norm behind them, in one operation and apart",
    )
    shape.add_argument(
        "--backend",
        nargs="+",
        choices=(*BACKENDS, "auto"),
        help="naive is the plain einsum and broadcast formula, inductor the same under torch.compile, auto what a "
        "model would use here (default: all that run on the device)",
    )
    steps = shape.add_mutually_exclusive_group()
    steps.add_argument("--no-steps", action="store_true", help="leave out the steps around an identity branch")
    steps.add_argument("--no-package", action="store_true", help=f"leave out the steps of {PACKAGE}")
    steps.add_argument("--package", action="store_true", help=f"an error where {PACKAGE} is not installed")
    add_run_arguments(parser, repeats=15, device=True, allocator="keep")
    return parse(parser, argv)


def choose_backends(args: argparse.Namespace) -> list[str]:
    """The backends to measure, without doubles; BenchmarkError for one that was asked for and cannot be had."""
    import torch
    from stream_cases import PLAIN, using_backend

    from megatron.core.transformer.streamwise_residual_backends import streamwise_backend

    fastest = "triton" if args.device == "cuda" else "compiled"
    names: list[str] = []
    for backend in args.backend or (*PLAIN, "eager", fastest):
        if backend in PLAIN:
            names.append(backend)
            continue
        try:
            with using_backend(backend):
                names.append(streamwise_backend(torch.device(args.device)))
        except (RuntimeError, ValueError, ImportError) as error:
            if args.backend:
                raise BenchmarkError(f"--backend {backend}: {error}") from error
            print(f"left out backend {backend}: {error}", file=sys.stderr)
    return list(dict.fromkeys(names))


def has_package(args: argparse.Namespace) -> bool:
    """Whether to measure hyper-connections; says so where it is not installed, BenchmarkError with --package."""
    if args.no_steps or args.no_package:
        return False
    if importlib.util.find_spec("hyper_connections") is not None:
        return True
    reason = f"{PACKAGE} is not installed; {INSTALL} installs it"
    if args.package:
        raise BenchmarkError(f"--package: {reason}")
    print(f"left out {PACKAGE}: {reason}", file=sys.stderr)
    return False


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, Shape]]:
    """Every combination of sizes and dtypes, with the dtype's name."""
    import torch
    from stream_cases import Shape

    wanted = (args.dtype, args.num_streams, args.hidden_size, args.tokens)
    for name, k, d, n in itertools.product(*(dict.fromkeys(values) for values in wanted)):
        yield name, Shape(k, d, n, getattr(torch, DTYPES[name]), args.device)


def measure(
    args: argparse.Namespace, dtype_name: str, shape: Shape, backends: list[str], package: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Copy bandwidth in bytes per second, and one record per case."""
    import torch
    from stream_cases import THEN, operator_cases, step_cases

    source = torch.ones((shape.tokens, shape.num_streams * shape.hidden_size), dtype=shape.dtype, device=shape.device)
    target = torch.empty_like(source)
    cases = list(operator_cases(shape, backends, retention=args.retention, norms=tuple(dict.fromkeys(args.norm))))
    if not args.no_steps:
        cases += step_cases(shape, backends, package=package)
    named = {f"{case.op} {case.direction} {case.backend} {case.retention}": case for case in cases}
    timings = interleave(
        {"copy": lambda: target.copy_(source), **{name: case.run for name, case in named.items()}},
        repeats=args.repeats,
        device=args.device,
    )
    rates = [2 * source.nbytes / seconds for seconds in timings["copy"].wall]
    seconds = {name: timings[name].wall for name in named}
    records = [_record(dtype_name, shape, case, seconds[name], rates) for name, case in named.items()]
    for record, name in zip(records, named, strict=True):
        case = named[name]
        record["speedup_over"] = {
            other.backend: statistics.median(over(seconds[other_name], seconds[name]))
            for other_name, other in named.items()
            if (other.op, other.direction, other.retention) == (case.op, case.direction, case.retention)
            and other_name != name
        }
        apart = f"{case.op.replace(' ', THEN)} {case.direction} {case.backend} {case.retention}"
        if apart in named and apart != name and THEN not in case.op:
            record["speedup_over"]["apart"] = statistics.median(over(seconds[apart], seconds[name]))
    return statistics.median(rates), records


def _record(dtype_name: str, shape: Shape, case: Case, seconds: list[float], rates: list[float]) -> dict[str, Any]:
    fraction = spread([case.bytes_moved / s / rate for s, rate in zip(seconds, rates, strict=True)])
    return {
        "op": case.op,
        "direction": case.direction,
        "backend": case.backend,
        "dtype": dtype_name,
        "num_streams": shape.num_streams,
        "hidden_size": shape.hidden_size,
        "tokens": shape.tokens,
        "retention": case.retention,
        "fraction_of_copy": fraction.median,
        "fraction_low": fraction.low,
        "fraction_high": fraction.high,
        "seconds": statistics.median(seconds),
    }


def make_report(args: argparse.Namespace, rates: dict[str, float], records: list[dict[str, Any]], auto: str) -> Report:
    """The results as a table."""
    import torch

    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    baselines = [name for name in ("naive", "inductor", "apart") if any(name in r["speedup_over"] for r in records)]
    others = list(dict.fromkeys(r["backend"] for r in records if r["backend"].startswith(PACKAGE)))
    columns = [Column(name) for name in ("dtype", "K", "D", "tokens", "operator", "direction", "backend")]
    columns += [Column(name, right=True) for name in ("of copy", "middle half", "ms")]
    columns += [Column(f"x {name.removeprefix(PACKAGE + ' ')}", right=True) for name in (*baselines, *others)]
    rows = []
    for record in records:
        row = [str(record[key]) for key in ("dtype", "num_streams", "hidden_size", "tokens")]
        row += [record["op"] + ("+retention" if record["retention"] else ""), record["direction"], record["backend"]]
        row += [f"{record['fraction_of_copy']:.2f}", f"{record['fraction_low']:.2f}-{record['fraction_high']:.2f}"]
        row.append(f"{record['seconds'] * 1e3:.3f}")
        speedups = [record["speedup_over"].get(name) for name in (*baselines, *others)]
        rows.append(row + ["" if speedup is None else f"{speedup:.1f}" for speedup in speedups])
    copies = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    note = f"copy: {copies}; a model here uses: {auto}; x ...: times as fast as; {machine_line(machine())}"
    return Report(f"streamwise operators, {where}, {args.repeats} repetitions", columns, rows, note)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    import torch
    from stream_cases import using_backend

    from megatron.core.transformer.streamwise_residual_backends import streamwise_backend

    prepare_process(args)
    backends = choose_backends(args)
    package = has_package(args)
    rates: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    for dtype_name, shape in shapes(args):
        label = f"{dtype_name} {shape.tokens}x{shape.num_streams}x{shape.hidden_size}"
        rates[label], measured = measure(args, dtype_name, shape, backends, package)
        records += measured
    with using_backend("auto"):
        auto = streamwise_backend(torch.device(args.device))
    report = make_report(args, rates, records, auto)
    report.print()
    write_outputs(args, records, [report])


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    return run_measurement(lambda: run(args))


if __name__ == "__main__":
    run_tool(main)
