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

Freed memory is kept in the process, as the training scripts keep it. A process as PyTorch leaves it gives it back and
page-faults at every large result; so on a CPU every case of naive, inductor and hyper-connections is also timed with
stock malloc (megatron/cpu/allocator.py), among the others, and a second table says how many times as fast as each, in
both settings, the backend is that a model uses here. Setting malloc is not timed.

Backends: naive is the einsum and broadcast formula, inductor the same under torch.compile, the others are those of
MEGATRON_STREAMWISE_BACKEND. Steps are also those of the PyPI package hyper-connections (stream_cases.py), where it is
installed: .venv/bin/pip install -c constraints.txt -e '.[benchmarks]'.

What always holds: nothing is measured before the arguments have been checked; files are written beside and renamed into
place. Exit status: 0 done, 2 bad arguments or a backend that this machine cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
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
PACKAGE = "hyper-connections"  # as in stream_cases.py, which imports torch
INSTALL = ".venv/bin/pip install -c constraints.txt -e '.[benchmarks]'"

NAMING = tuple(Column(name) for name in ("dtype", "K", "D", "tokens", "operator", "direction", "backend"))


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
    add_run_arguments(parser, repeats=15, device=True, allocator="auto")
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


def has_stock_malloc(args: argparse.Namespace, backends: list[str], kept: bool) -> bool:
    """Whether to time the others with stock malloc too; says why not, but on a GPU, where malloc does not matter."""
    from stream_cases import PLAIN

    from megatron.cpu.allocator import stock_malloc, why_not_kept

    if args.device != "cpu":
        return False
    if args.allocator == "default":
        reason = "--allocator default leaves malloc as it is for every case"
    elif not kept:
        reason = f"{why_not_kept()}, so malloc is left as it is for every case"
    elif set(backends) <= set(PLAIN):
        reason = "no backend of this repository is measured, so there is nothing to compare"
    else:
        try:
            with stock_malloc():
                return True
        except RuntimeError as error:
            reason = str(error)
    print(f"left out stock malloc: {reason}", file=sys.stderr)
    return False


def shapes(args: argparse.Namespace) -> Iterator[tuple[str, Shape]]:
    """Every combination of sizes and dtypes, with the dtype's name."""
    import torch
    from stream_cases import Shape

    wanted = (args.dtype, args.num_streams, args.hidden_size, args.tokens)
    for name, k, d, n in itertools.product(*(dict.fromkeys(values) for values in wanted)):
        yield name, Shape(k, d, n, getattr(torch, DTYPES[name]), args.device)


def measure(
    args: argparse.Namespace, dtype_name: str, shape: Shape, cases: list[Case], kept: bool
) -> tuple[float, list[dict[str, Any]]]:
    """Copy bandwidth in bytes per second, and one record per case."""
    import torch
    from stream_cases import THEN

    source = torch.ones((shape.tokens, shape.num_streams * shape.hidden_size), dtype=shape.dtype, device=shape.device)
    target = torch.empty_like(source)
    named = {f"{case.op} {case.direction} {case.way} {case.retention}": case for case in cases}
    copy = partial(target.copy_, source)
    timings = interleave(
        {"copy": copy, **{name: case.run for name, case in named.items()}},
        repeats=args.repeats,
        device=args.device,
        around={name: partial(_setting, case, copy) for name, case in named.items()},
    )
    rates = [2 * source.nbytes / seconds for seconds in timings["copy"].wall]
    seconds = {name: timings[name].wall for name in named}
    records = [_record(dtype_name, shape, case, seconds[name], rates) for name, case in named.items()]
    for record, name in zip(records, named, strict=True):
        case = named[name]
        record["malloc"] = "stock" if case.stock else "kept" if kept else "as it is"
        record["speedup_over"] = {
            other.way: statistics.median(over(seconds[other_name], seconds[name]))
            for other_name, other in named.items()
            if (other.op, other.direction, other.retention) == (case.op, case.direction, case.retention)
            and other_name != name
        }
        apart = f"{case.op.replace(' ', THEN)} {case.direction} {case.way} {case.retention}"
        if apart in named and apart != name and THEN not in case.op:
            record["speedup_over"]["apart"] = statistics.median(over(seconds[apart], seconds[name]))
    return statistics.median(rates), records


@contextlib.contextmanager
def _setting(case: Case, copy: Callable[[], Any]) -> Iterator[None]:
    """What a case runs in, so that choosing it is not timed: its backend and its malloc.

    Stock malloc holds the small blocks of an earlier call of the case, with something else in the caches.
    """
    from stream_cases import using_backend

    from megatron.cpu.allocator import stock_malloc

    with using_backend(case.backend), stock_malloc() if case.stock else contextlib.nullcontext():
        if case.stock:
            case.run()
            copy()
        yield


def all_cases(args: argparse.Namespace, shape: Shape, backends: list[str], *, package: bool, stock: bool) -> list[Case]:
    """What is measured at one set of sizes."""
    from stream_cases import operator_cases, step_cases, stock_cases

    cases = list(operator_cases(shape, backends, retention=args.retention, norms=tuple(dict.fromkeys(args.norm))))
    if not args.no_steps:
        cases += step_cases(shape, backends, package=package)
    return cases + stock_cases(cases) if stock else cases


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


def make_report(
    args: argparse.Namespace, rates: dict[str, float], records: list[dict[str, Any]], auto: str, kept: bool
) -> Report:
    """The results as a table."""
    import torch

    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    baselines = [name for name in ("naive", "inductor", "apart") if any(name in r["speedup_over"] for r in records)]
    others = list(dict.fromkeys(r["backend"] for r in records if r["backend"].startswith(PACKAGE)))
    columns = [*NAMING]
    columns += [Column(name, right=True) for name in ("of copy", "middle half", "ms")]
    columns += [Column(f"x {name.removeprefix(PACKAGE + ' ')}", right=True) for name in (*baselines, *others)]
    rows = []
    for record in records:
        if record["malloc"] == "stock":  # in the table that compares
            continue
        row = _named(record)
        row += [f"{record['fraction_of_copy']:.2f}", f"{record['fraction_low']:.2f}-{record['fraction_high']:.2f}"]
        row.append(f"{record['seconds'] * 1e3:.3f}")
        speedups = [record["speedup_over"].get(name) for name in (*baselines, *others)]
        rows.append(row + ["" if speedup is None else f"{speedup:.1f}" for speedup in speedups])
    copies = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    malloc = "" if args.device == "cuda" else f"freed memory {'kept' if kept else 'not kept'}; "
    note = f"copy: {copies}; a model here uses: {auto}; {malloc}x ...: times as fast as; {machine_line(machine())}"
    return Report(f"streamwise operators, {where}, {args.repeats} repetitions", columns, rows, note)


def make_stock_report(records: list[dict[str, Any]], auto: str) -> Report:
    """The backend of a model here against the others in its setting and with stock malloc.

    Where that backend was not measured: every backend of this repository.
    """
    from stream_cases import STOCK, is_other

    ours = {r["backend"] for r in records if not is_other(r["backend"])}
    ours = {auto} if auto in ours else ours
    keys = ("dtype", "num_streams", "hidden_size", "tokens", "op", "direction", "retention")
    seconds = {(*(r[key] for key in keys), r["backend"], r["malloc"]): r["seconds"] for r in records}
    rows = []
    for record in (r for r in records if r["backend"] in ours):
        speedups = record["speedup_over"]
        for other in (name for name in speedups if f"{name}{STOCK}" in speedups):
            case = tuple(record[key] for key in keys)
            times = [record["seconds"], seconds[*case, other, "kept"], seconds[*case, other, "stock"]]
            kept, kept_other, stock_other = (f"{value * 1e3:.3f}" for value in times)
            row = [*_named(record), kept, other, kept_other, f"{speedups[other]:.1f}", stock_other]
            rows.append([*row, f"{speedups[f'{other}{STOCK}']:.1f}"])
    columns = [*NAMING, Column("ms", right=True), Column("other")]
    columns += [Column(name, right=True) for name in ("its ms", "x", "its ms stock", "x stock")]
    note = (
        "ms, its ms: freed memory kept; stock: malloc as PyTorch leaves it; x: times as fast as the other; x stock: "
        "times as fast, with freed memory kept, as the other with stock malloc"
    )
    return Report("against others with freed memory kept, and with stock malloc", columns, rows, note)


def _named(record: dict[str, Any]) -> list[str]:
    """The columns of NAMING."""
    sizes = [str(record[key]) for key in ("dtype", "num_streams", "hidden_size", "tokens")]
    return [
        *sizes,
        record["op"] + ("+retention" if record["retention"] else ""),
        record["direction"],
        record["backend"],
    ]


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    import torch
    from stream_cases import using_backend

    from megatron.core.transformer.streamwise_residual_backends import streamwise_backend

    kept = prepare_process(args)
    backends = choose_backends(args)
    package = has_package(args)
    stock = has_stock_malloc(args, backends, kept)
    rates: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    for dtype_name, shape in shapes(args):
        label = f"{dtype_name} {shape.tokens}x{shape.num_streams}x{shape.hidden_size}"
        cases = all_cases(args, shape, backends, package=package, stock=stock)
        rates[label], measured = measure(args, dtype_name, shape, cases, kept)
        records += measured
    with using_backend("auto"):
        auto = streamwise_backend(torch.device(args.device))
    reports = [make_report(args, rates, records, auto, kept)]
    if any(record["malloc"] == "stock" for record in records):
        reports.append(make_stock_report(records, auto))
    for report in reports:
        report.print()
    write_outputs(args, records, reports)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    return run_measurement(lambda: run(args))


if __name__ == "__main__":
    run_tool(main)
