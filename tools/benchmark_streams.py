#!/usr/bin/env python3
"""Measures the streamwise operators against this machine's copy bandwidth.

    python tools/benchmark_streams.py
    python tools/benchmark_streams.py --num-streams 8 --hidden-size 512 --dtype bf16 --retention --json streams.json

Every repetition times one copy of a wide stream into memory that exists, then every operator, so that a busy machine
slows both. An operator's fraction is its bytes per second over those of the copy of the same repetition; the table
shows the median and the range of the middle half. Operators are called as a model calls them and allocate their
results.

Bytes moved per token, in units of D elements (K streams):

    copy             2K      reads X, writes a copy
    read   forward   K + 1   reads X; writes z
    read   backward  2K + 1  reads X, gZ; writes dX
    write  forward   2K + 1  reads X, u; writes Y
    write  backward  K + 2   reads gY, u; writes du (dX is gY itself)
      with retention 3K + 2  reads gY, u, X; writes du, dX

What always holds: nothing is measured before the arguments have been checked; --json is written beside and renamed into
place. Exit status: 0 done, 2 bad arguments or a backend that this machine cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from quiet_imports import quiet_imports

if TYPE_CHECKING:
    import torch

BACKENDS = ("naive", "eager", "compiled")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
WARM_UP_CALLS = 2
MAX_FORGET = 0.1


class BenchmarkError(Exception):
    """What was asked for cannot be measured here."""


@dataclass(frozen=True)
class Case:
    """One operator in one direction: how to run it once, and how many bytes that moves."""

    op: str
    direction: str
    backend: str
    retention: bool
    bytes_moved: int
    run: Callable[[], Any]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, got {text!r}")
    return value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argparse.ArgumentParser(
        description="Measure the streamwise operators' forward and backward as fractions of the copy bandwidth.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    shape = parser.add_argument_group("what is measured")
    shape.add_argument("--num-streams", type=_positive, default=4, metavar="K", help="number of residual streams")
    shape.add_argument("--hidden-size", type=_positive, default=1024, metavar="D", help="width of a branch")
    shape.add_argument("--tokens", type=_positive, default=4096, metavar="N", help="tokens per call")
    shape.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"], help="dtypes of X and u")
    shape.add_argument("--retention", action="store_true", help="also measure the write with learned retention")
    shape.add_argument(
        "--backend",
        nargs="+",
        choices=(*BACKENDS, "auto"),
        help="naive is the plain einsum and broadcast formula, auto what a model would use here "
        "(default: all that run on the device)",
    )
    run = parser.add_argument_group("how")
    run.add_argument("--repeats", type=_positive, default=15, metavar="N", help="interleaved repetitions")
    run.add_argument("--threads", type=_positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    run.add_argument(
        "--allocator",
        choices=("keep", "default"),
        default="keep",
        help="keep freed memory in the process (megatron/cpu/allocator.py), or leave malloc as it is: results above "
        "32 MiB then page-fault on every call. CPU only",
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE (default: no file)")
    args = parser.parse_args(argv)
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"argument --json: the folder {args.json.resolve().parent} does not exist")
    return args


def choose_backends(args: argparse.Namespace) -> list[str]:
    """The backends to measure, without doubles; BenchmarkError for one that was asked for and cannot be had."""
    import torch

    from megatron.core.transformer.streamwise_residual_backends import streamwise_backend
    from megatron.core.transformer.streamwise_residual_compiled import CompiledKernelsError

    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    device = torch.device(args.device)
    names: list[str] = []
    for backend in args.backend or BACKENDS:
        if backend == "naive":
            names.append(backend)
            continue
        try:
            with _backend(backend):
                names.append(streamwise_backend(device))
        except (CompiledKernelsError, ValueError) as error:
            if args.backend:
                raise BenchmarkError(f"--backend {backend}: {error}") from error
            print(f"left out backend {backend}: {error}", file=sys.stderr)
    return list(dict.fromkeys(names))


class _backend:  # noqa: N801
    """Context in which the operators use a backend."""

    def __init__(self, name: str) -> None:
        from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE

        self._variable, self._name = BACKEND_VARIABLE, name

    def __enter__(self) -> None:
        self._before = os.environ.get(self._variable)
        os.environ[self._variable] = self._name

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[self._variable]
        else:
            os.environ[self._variable] = self._before


def naive_read(x: torch.Tensor, logits: torch.Tensor, num_streams: int) -> torch.Tensor:
    """z = sum_k sigmoid(r_k) X_k as one writes it down."""
    import torch

    factors = logits[:num_streams].sigmoid().to(x.dtype)
    return torch.einsum("nkd,k->nd", x.unflatten(-1, (num_streams, -1)), factors)


def naive_write(
    x: torch.Tensor, u: torch.Tensor, logits: torch.Tensor, num_streams: int, retention: torch.Tensor | None
) -> torch.Tensor:
    """Y_k = g_k X_k + 2 sigmoid(s_k) u as one writes it down."""
    factors = (2 * logits[:num_streams].sigmoid()).to(x.dtype)[:, None]
    kept = x.unflatten(-1, (num_streams, -1))
    if retention is not None:
        kept = (1 - MAX_FORGET * (-retention[:num_streams]).sigmoid()).to(x.dtype)[:, None] * kept
    return (kept + factors * u.unsqueeze(-2)).flatten(-2)


def operator_cases(args: argparse.Namespace, dtype: torch.dtype, backends: list[str]) -> Iterator[Case]:
    """Every operator, direction and backend for one dtype, on one set of inputs."""
    import torch

    from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read, streamwise_sigmoid_writeback

    k, d, n = args.num_streams, args.hidden_size, args.tokens
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    x, u = random(n, k * d, dtype=dtype), random(n, d, dtype=dtype)
    controllers = [random(max(128, k)) for _ in range(3)]
    unit = n * d * x.element_size()

    def read(backend: str) -> torch.Tensor:
        if backend == "naive":
            return naive_read(x, controllers[0], k)
        return streamwise_sigmoid_read(x, controllers[0], k)

    def write(backend: str, retention: torch.Tensor | None) -> torch.Tensor:
        if backend == "naive":
            return naive_write(x, u, controllers[1], k, retention)
        return streamwise_sigmoid_writeback(
            x, u, controllers[1], k, retention_logits=retention, retention_max_forget=MAX_FORGET
        )

    for backend in backends:
        yield from _both_directions(
            ("read", backend, False),
            partial(read, backend),
            [x, controllers[0]],
            ((k + 1) * unit, (2 * k + 1) * unit),
        )
        for retention in (None, controllers[2]) if args.retention else (None,):
            inputs = [x, u, controllers[1], *([] if retention is None else [retention])]
            backward = ((k + 2) if retention is None else (3 * k + 2)) * unit
            yield from _both_directions(
                ("write", backend, retention is not None),
                partial(write, backend, retention),
                inputs,
                ((2 * k + 1) * unit, backward),
            )


def _both_directions(
    name: tuple[str, str, bool],
    call: Callable[[], torch.Tensor],
    inputs: list[torch.Tensor],
    bytes_moved: tuple[int, int],
) -> Iterator[Case]:
    import torch

    op, backend, retention = name

    def forward() -> torch.Tensor:
        with _backend("auto" if backend == "naive" else backend), torch.no_grad():
            return call()

    with _backend("auto" if backend == "naive" else backend):
        result = call()  # its graph is kept, so that a repetition of the backward is the backward alone
    gradient = torch.ones_like(result).contiguous()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(result, inputs, gradient, retain_graph=True)

    yield Case(op, "forward", backend, retention, bytes_moved[0], forward)
    yield Case(op, "backward", backend, retention, bytes_moved[1], backward)


def measure(args: argparse.Namespace, dtype_name: str, backends: list[str]) -> tuple[float, list[dict[str, Any]]]:
    """Copy bandwidth in bytes per second, and one record per case with its spread under the key `quartiles`."""
    import torch

    dtype = getattr(torch, DTYPES[dtype_name])
    wide = args.num_streams * args.hidden_size
    source = torch.ones((args.tokens, wide), dtype=dtype, device=args.device)
    target = torch.empty_like(source)
    copy = Case("copy", "forward", "torch", False, 2 * source.nbytes, lambda: target.copy_(source))
    cases = [copy, *operator_cases(args, dtype, backends)]
    seconds: list[list[float]] = [[] for _ in cases]
    for repetition in range(WARM_UP_CALLS + args.repeats):
        for case, measured in zip(cases, seconds, strict=True):
            elapsed = _seconds(case.run, args.device)
            if repetition >= WARM_UP_CALLS:
                measured.append(elapsed)
    copy_rates = [copy.bytes_moved / elapsed for elapsed in seconds[0]]
    records = []
    for case, measured in zip(cases[1:], seconds[1:], strict=True):
        fractions = [case.bytes_moved / s / rate for s, rate in zip(measured, copy_rates, strict=True)]
        records.append(
            {
                "op": case.op,
                "direction": case.direction,
                "backend": case.backend,
                "dtype": dtype_name,
                "num_streams": args.num_streams,
                "hidden_size": args.hidden_size,
                "tokens": args.tokens,
                "retention": case.retention,
                "fraction_of_copy": statistics.median(fractions),
                "seconds": statistics.median(measured),
                "quartiles": _quartiles(fractions),
            }
        )
    return statistics.median(copy_rates), records


def _seconds(run: Callable[[], Any], device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result  # freed outside the time that is measured
    return elapsed


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def print_table(args: argparse.Namespace, rates: dict[str, float], records: list[dict[str, Any]], auto: str) -> None:
    """The results as a table on stdout."""
    import torch
    from rich.console import Console
    from rich.table import Table

    copies = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    table = Table(
        padding=(0, 0),
        title=f"K={args.num_streams} D={args.hidden_size} tokens={args.tokens}, {where}, {args.repeats} repetitions",
        caption=f"copy: {copies}; a model here uses: {auto}",
    )
    for column in ("dtype", "operator", "direction", "backend"):
        table.add_column(column, no_wrap=True)
    for column in ("of copy", "middle half", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for record in records:
        low, high = record["quartiles"]
        table.add_row(
            record["dtype"],
            record["op"] + ("+retention" if record["retention"] else ""),
            record["direction"],
            record["backend"],
            f"{record['fraction_of_copy']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{record['seconds'] * 1e3:.3f}",
        )
    Console().print(table)


def write_json(path: Path, records: list[dict[str, Any]]) -> None:
    """Write the records, without the spread, beside `path` and rename them into place."""
    rows = [{key: value for key, value in record.items() if key != "quartiles"} for record in records]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(json.dumps(rows, indent=2) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write; BenchmarkError where that is impossible."""
    import torch

    from megatron.core.transformer.streamwise_residual_backends import streamwise_backend
    from megatron.cpu.allocator import keep_freed_memory

    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cpu" and args.allocator == "keep" and not keep_freed_memory():
        print("this C library has no mallopt: --allocator keep has no effect", file=sys.stderr)
    backends = choose_backends(args)
    rates: dict[str, float] = {}
    records: list[dict[str, Any]] = []
    for dtype_name in dict.fromkeys(args.dtype):
        rates[dtype_name], measured = measure(args, dtype_name, backends)
        records += measured
    with _backend("auto"):
        auto = streamwise_backend(torch.device(args.device))
    print_table(args, rates, records, auto)
    if args.json:
        write_json(args.json, records)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        with quiet_imports():
            import megatron.core.transformer.streamwise_residual_ops  # noqa: F401
        run(args)
    except (BenchmarkError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
