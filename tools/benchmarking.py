"""What the benchmark tools share: arguments, interleaved repetitions, spreads, tables, files and exit statuses.

    parser = argument_parser("Measure this.", "example: tools/benchmark_this.py")
    add_run_arguments(parser, repeats=15)
    args = parse(parser, argv)
    timings = interleave({"ours": run_ours, "theirs": run_theirs}, repeats=args.repeats)
    ratio = spread(over(timings["theirs"], timings["ours"]))         # formed within each repetition
    Report(title, [Column("case"), Column("ms", right=True)], rows).print()

Every repetition runs each case once, and begins with another case, so that a busy machine slows all of them and none
always follows the same neighbour. Figures are medians, with the range of the middle half beside them.

What always holds: importing this module imports nothing heavy; files are written beside and renamed into place.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quiet_imports import quiet_imports

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


class BenchmarkError(Exception):
    """What was asked for cannot be measured here; the message says why and what to do."""


def positive(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, got {text!r}")
    return value


def argument_parser(description: str, example: str, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help shows defaults and ends with an example."""
    return argparse.ArgumentParser(
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
        **options,
    )


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    repeats: int,
    device: bool = False,
    allocator: str | None = None,
    plot: bool = False,
) -> Any:
    """Add the options on how to measure and where to write; returns their group.

    Args:
        repeats: default of --repeats.
        device: whether there is --device.
        allocator: default of --allocator, "keep", "default" or "auto", which only a tool has that says what it came
            to; None leaves the option out.
        plot: whether there is --plot.
    """
    run = parser.add_argument_group("how")
    run.add_argument("--repeats", type=positive, default=repeats, metavar="N", help="interleaved repetitions")
    run.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    if device:
        run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    if allocator is not None:
        run.add_argument(
            "--allocator",
            choices=("auto", "keep", "default") if allocator == "auto" else ("keep", "default"),
            default=allocator,
            help="keep freed memory in the process (megatron/cpu/allocator.py), or leave malloc as it is: results "
            "above 32 MiB then page-fault on every call. CPU only"
            + ("; auto keeps it where malloc lets it" if allocator == "auto" else ""),
        )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE (default: no file)")
    run.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to FILE as Markdown")
    if plot:
        run.add_argument("--plot", type=Path, metavar="FILE", help="also draw the results into FILE (PNG)")
    return run


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse, and refuse output files whose folder does not exist."""
    args = parser.parse_args(argv)
    check_output_files(parser, args)
    return args


def check_output_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message where a folder is missing, or a plot is no PNG."""
    for option in ("json", "markdown", "plot"):
        path = getattr(args, option, None)
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"argument --{option}: the folder {path.resolve().parent} does not exist")
    plot = getattr(args, "plot", None)
    if plot is not None and plot.suffix != ".png":
        parser.error(f"argument --plot: a name that ends in .png is wanted, got {plot.name!r}")


def prepare_process(args: argparse.Namespace) -> bool:
    """Apply --threads, --device and --allocator; BenchmarkError for a device or a policy that is not there.

    Returns: whether freed memory is kept.
    """
    import torch

    from megatron.cpu.allocator import keep_freed_memory, why_not_kept

    device = getattr(args, "device", "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    allocator = getattr(args, "allocator", "default")
    if device != "cpu" or allocator == "default":
        return False
    kept = keep_freed_memory()
    if allocator == "keep" and not kept:
        raise BenchmarkError(f"--allocator keep: {why_not_kept()}; use default")
    return kept


@dataclass
class Timings:
    """Seconds of each repetition of a case: of the clock, and of the processors."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def interleave(
    cases: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warm_up: int = 2,
    device: str = "cpu",
    around: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
) -> dict[str, Timings]:
    """Run every case once per repetition; results are freed, and a GPU is waited for, outside the time measured.

    The order is another one in every repetition, the same for every run: what a case leaves behind in caches and in
    the allocator falls on all others.

    Args:
        around: contexts of cases that need a state of their own, entered and left outside the time measured.
    """
    around = around or {}
    timings = {name: Timings() for name in cases}
    for repetition in range(warm_up + repeats):
        names = list(cases)
        random.Random(repetition).shuffle(names)
        for name in names:
            with around.get(name, contextlib.nullcontext)():
                elapsed, cpu_elapsed = _timed(cases[name], device)
            if repetition >= warm_up:
                timings[name].wall.append(elapsed)
                timings[name].cpu.append(cpu_elapsed)
    return timings


def _timed(case: Callable[[], Any], device: str) -> tuple[float, float]:
    _synchronize(device)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = case()
    _synchronize(device)
    elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
    del result  # after the clock has been read
    return elapsed, cpu_elapsed


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def peak_rise(run: Callable[[], Any], device: str = "cpu") -> int:
    """How far the allocated bytes rise above those held before `run`, as PyTorch's allocator counts."""
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler says on stderr that it starts
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    kineto = profile.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))


@dataclass(frozen=True)
class Spread:
    """Median and middle half of some values."""

    median: float
    low: float
    high: float

    def text(self, decimals: int = 2) -> tuple[str, str]:
        """The median and the range, for a table."""
        return f"{self.median:.{decimals}f}", f"{self.low:.{decimals}f}-{self.high:.{decimals}f}"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), low, high)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The range that holds the true median with this confidence, whatever the distribution: two of the sorted values.

    Of n values the number below the median is binomial(n, 1/2), which sets the ranks (Conover, Practical Nonparametric
    Statistics, 3.2). Fewer than 6 values cannot say 0.95; the range is then all of them.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < n // 2 and (outside := outside + 2 * math.comb(n, rank) / 2**n) <= 1 - confidence:
        rank += 1
    lowest = max(rank - 1, 0)
    return ordered[lowest], ordered[n - 1 - lowest]


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """values / others, repetition by repetition."""
    return [value / other for value, other in zip(values, others, strict=True)]


@dataclass(frozen=True)
class Column:
    """A column of a report."""

    name: str
    right: bool = False


@dataclass
class Report:
    """A table with a title and a note, for people."""

    title: str
    columns: list[Column]
    rows: list[list[str]]
    note: str = ""

    def print(self) -> None:
        """The table on stdout."""
        from rich.console import Console
        from rich.table import Table

        table = Table(padding=(0, 0), title=self.title, caption=self.note or None)
        for column in self.columns:
            table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        # Columns that are cut off say nothing: a file or a pipe takes any width.
        (console if console.is_terminal else Console(width=160)).print(table)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(column.name for column in self.columns) + " |"]
        lines.append("|" + "|".join("---:" if column.right else "---" for column in self.columns) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else [])])


def machine() -> dict[str, Any]:
    """What a figure belongs to: when, processor, GPU, threads, PyTorch, and the load average, which says how busy."""
    import torch

    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.version.cuda and torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def machine_line(found: Mapping[str, Any]) -> str:
    """The same as one sentence."""
    where = found["gpu"] or f"{found['processor']}, {found['cores']} cores, {found['threads']} threads"
    loads = " ".join(f"{load:g}" for load in found["load_average"])
    return f"{found['date']}, {where}, PyTorch {found['torch']}, load average {loads}"


def write_outputs(args: argparse.Namespace, results: Any, reports: Sequence[Report]) -> None:
    """Write --json and --markdown where asked for."""
    if args.json:
        with written_beside(args.json) as path:
            path.write_text(json.dumps(results, indent=2) + "\n")
    if args.markdown:
        command = " ".join(["python", *sys.argv])
        parts = [f"`{command}`", machine_line(machine()), *(report.markdown() for report in reports)]
        with written_beside(args.markdown) as path:
            path.write_text("\n\n".join(parts) + "\n")


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a name beside path; rename it to path at the end."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def run_measurement(run: Callable[[], None]) -> int:
    """Run a tool's work, quietly but for what it prints, and return its exit status.

    0, 2 for what cannot be measured or written, 130 interrupted.
    """
    try:
        with quiet_imports():
            import torch  # noqa: F401

            import megatron.core  # noqa: F401

            run()
    except (BenchmarkError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
