#!/usr/bin/env python3
"""Compares training runs side by side, from the TensorBoard files that they wrote.

    python tools/compare_runs.py runs/quickstart/ordinary runs/quickstart/wide-4 --plot loss.png --json results.json

Each RUN is the folder given to --tensorboard-dir, or one that holds it as `tensorboard`. The table has the parameters,
the losses, the speed and the peak memory of each run; a value that a run did not log is shown as "-" (null in JSON).

What always holds: numbers are those that the trainer logged, nothing is fitted or guessed; after a resume the later
value of a step counts; files are written beside and renamed into place. Exit status: 0 done, 2 bad input or flags.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from closed_pipe import run_tool
from quiet_imports import quiet_imports

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class RunError(ValueError):
    """A folder that cannot be read as a training run."""


@dataclass
class Run:
    """What one run logged. Losses are nats per token, memory is bytes, `curves` maps steps to losses."""

    name: str
    path: str
    num_streams: int
    parameters: int | None
    controller_parameters: int | None
    iterations: int
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    tokens_per_step: int
    train_curve: dict[int, float] = field(repr=False)
    validation_curve: dict[int, float] = field(repr=False)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        description="Compare training runs from their TensorBoard files: a table, and a plot of the loss curves.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of --tensorboard-dir, or the one above it")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="names to show (default: the folders' names)")
    parser.add_argument("--plot", metavar="FILE", help=f"write the loss curves to FILE ({', '.join(PLOT_SUFFIXES)})")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE as a list with one object per run")
    parser.add_argument(
        "--tail", type=int, default=10, metavar="N", help="train loss is the mean of the last N steps (default: 10)"
    )
    args = parser.parse_args(argv)
    if args.names and len(args.names) != len(args.runs):
        parser.error(f"--names has {len(args.names)} names for {len(args.runs)} runs")
    if args.plot and Path(args.plot).suffix not in PLOT_SUFFIXES:
        parser.error(f"--plot {args.plot}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if args.tail < 1:
        parser.error(f"--tail {args.tail}: at least 1")
    return args


def read_run(path: Path, name: str, tail: int) -> Run:
    """Read the TensorBoard files of one run. Raises RunError, naming the folder, when they are not a training run's."""
    if not path.is_dir():
        raise RunError(f"{path}: no such folder")
    folder = path / "tensorboard" if (path / "tensorboard").is_dir() else path
    if not any(folder.glob("events.out.tfevents.*")):
        raise RunError(f"{folder} holds no TensorBoard files: give the folder of the run's --tensorboard-dir")
    with quiet_imports():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()

    train_curve = _scalars(events, "lm loss")
    if not train_curve:
        raise RunError(f"{folder} holds no step with a loss: the run ended before it logged one")
    tokens_per_step = _argument(events, folder, "global_batch_size") * _argument(events, folder, "seq_length")
    validation_curve = _scalars(events, "lm loss validation")
    times = list(_scalars(events, "iteration-time").values())
    memory = _scalars(events, "mem-max-allocated-bytes")
    last = max(train_curve)
    return Run(
        name=name,
        path=str(path),
        num_streams=_argument(events, folder, "wide_residual", absent=1),
        parameters=_text(events, "parameters/base", int),
        controller_parameters=_text(events, "parameters/controllers", int),
        iterations=last,
        tokens=last * tokens_per_step,
        train_loss=statistics.fmean(list(train_curve.values())[-tail:]),
        validation_loss=validation_curve[max(validation_curve)] if validation_curve else None,
        tokens_per_second=tokens_per_step / statistics.median(times) if times else None,
        peak_memory_bytes=int(max(memory.values())) if memory else None,
        tokens_per_step=tokens_per_step,
        train_curve=train_curve,
        validation_curve=validation_curve,
    )


def _scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    """{step: value} in the order of the steps; empty when the run has no such scalar."""
    if tag not in events.Tags()["scalars"]:
        return {}
    newest = {event.step: event.value for event in sorted(events.Scalars(tag), key=lambda event: event.wall_time)}
    return dict(sorted(newest.items()))


def _text[T](events: EventAccumulator, tag: str, convert: Callable[[str], T]) -> T | None:
    key = f"{tag}/text_summary"
    if key not in events.Tags()["tensors"]:
        return None
    text = events.Tensors(key)[-1].tensor_proto.string_val[0].decode(errors="replace")
    try:
        return convert(text)
    except ValueError:
        raise RunError(f"{events.path} holds no usable {tag} (found {text[:80]!r})") from None


def _argument(events: EventAccumulator, folder: Path, name: str, absent: int | None = None) -> int:
    """An integer argument of the run, from the texts that the trainer writes; `absent` stands for an unset one."""
    text = _text(events, name, str)
    if text in (None, "None") and absent is not None:
        return absent
    if text is None or not text.isdecimal():
        raise RunError(f"{folder} holds no usable {name} (found {text}): was it written by a script of this project?")
    return int(text)


def print_table(runs: list[Run]) -> None:
    """Print one row per run, as wide as its text needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("run", box=box.SIMPLE_HEAD)
    for heading in ("streams", "parameters", "tokens", "train loss", "validation loss", "tokens/s", "peak memory"):
        table.add_column(heading, justify="right")
    for run in runs:
        parameters = _shown(run.parameters, ",")
        if run.controller_parameters:
            parameters += f" + {run.controller_parameters:,}"
        mebibytes = None if run.peak_memory_bytes is None else run.peak_memory_bytes / 2**20
        table.add_row(
            run.name,
            str(run.num_streams),
            parameters,
            f"{run.tokens:,}",
            f"{run.train_loss:.4f}",
            _shown(run.validation_loss, ".4f"),
            _shown(run.tokens_per_second, ",.0f"),
            _shown(mebibytes, ",.0f", " MiB"),
        )
    # A pipe has no width of its own; a narrow terminal gets the whole table too, its lines wrapped by the terminal.
    Console(width=max(Console().width, 120)).print(table)


def _shown(value: float | None, style: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{style}}{unit}"


def write_json(runs: list[Run], file: Path) -> None:
    """Write the numbers of the table, without the curves."""
    rows = [{key: value for key, value in asdict(run).items() if not key.endswith("_curve")} for run in runs]
    partial = _partial(file)
    partial.write_text(json.dumps(rows, indent=2) + "\n")
    os.replace(partial, file)


def write_plot(runs: list[Run], file: Path) -> None:
    """Plot training losses as lines and validation losses as marks over the tokens seen."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), dpi=130, layout="constrained")
    for number, run in enumerate(runs):
        color = f"C{number}"
        for curve, style in ((run.train_curve, {"lw": 1, "alpha": 0.55}), (run.validation_curve, {"marker": "o"})):
            tokens = [step * run.tokens_per_step / 1000 for step in curve]
            label = f"{run.name}, {'training' if curve is run.train_curve else 'validation'}"
            if curve:
                axes.plot(tokens, list(curve.values()), color=color, label=label, **style)
    axes.set(xlabel="thousand tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    partial = _partial(file)
    figure.savefig(partial, format=file.suffix[1:])
    pyplot.close(figure)
    os.replace(partial, file)


def _partial(file: Path) -> Path:
    """The name that a file has while it is being written; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}")


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    paths = [Path(text) for text in args.runs]
    names = args.names or [path.resolve().name for path in paths]
    try:
        runs = [read_run(path, name, args.tail) for path, name in zip(paths, names, strict=True)]
        print_table(runs)
        if args.json:
            write_json(runs, Path(args.json))
        if args.plot:
            write_plot(runs, Path(args.plot))
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_tool(main)
