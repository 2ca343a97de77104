#!/usr/bin/env python3
"""Draws how a checkpoint's layers read and write their residual streams: heat maps, layer by stream.

    python tools/plot_streams.py runs/mine/checkpoints --output streams.png
    python tools/plot_streams.py runs/mine/checkpoints --step 500 --json streams.json

Panels: read factors (the readout in the last line), write factors, retention where it is learned, and how many streams
each branch reads (exp of the entropy of its read factors). docs/monitor.md says what healthy ones look like. Both
checkpoint formats are read; no weight is but the controllers.

What always holds: files are written beside and renamed into place. Exit status: 0 done, 2 for a checkpoint that cannot
be read or has an ordinary residual stream.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from closed_pipe import run_tool
from quiet_imports import quiet_imports

_CONTROLLER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.residual_(?:read|write|connection)(?P<suffix>_\w+?)?\.")
_PANELS = (("read", "read factor"), ("write", "write factor"), ("retention", "retention"))


class PlotError(Exception):
    """What was asked for cannot be drawn; the message says why and what to do."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argparse.ArgumentParser(
        description="Draw how a checkpoint's layers read and write their residual streams.",
        epilog="example: tools/plot_streams.py runs/mine/checkpoints --output streams.png",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="a run's --save folder, or the folder of one step")
    parser.add_argument("--step", type=int, metavar="N", help="the step to draw (default: the latest)")
    parser.add_argument("--output", type=Path, default=Path("streams.png"), metavar="FILE", help="the picture (PNG)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE (default: no file)")
    args = parser.parse_args(argv)
    if args.output.suffix != ".png":
        parser.error(f"argument --output: a name that ends in .png is wanted, got {args.output.name!r}")
    for option, path in (("--output", args.output), ("--json", args.json)):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"argument {option}: the folder {path.resolve().parent} does not exist")
    return args


def branch_of(name: str) -> str:
    """Return the stable name of a controller's branch, as training logs it: "003.mlp", "readout"."""
    found = _CONTROLLER.search(name)
    if found is None:
        return "readout"
    layer = int(found["layer"])
    branch = (found["suffix"] or "_mamba")[1:]
    return f"{layer + 1:03d}.{branch}"


def stream_table(report: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return {branch: {kind: factors}} in the order of the forward, from inspect_checkpoint's report.

    Raises:
        PlotError: an incomplete checkpoint, or one with an ordinary residual stream.
    """
    from megatron.training.stream_health.branches import key_order

    if not report["complete"]:
        raise PlotError(f"{report['folder']} is not complete: {report['damage']}")
    if report["streams"] is None:
        raise PlotError(f"{report['folder']} is of an ordinary model; a wide one (--wide-residual K) is wanted")
    table: dict[str, dict[str, list[float]]] = {}
    for name, controller in report["controllers"].items():
        kind = "read" if controller["kind"] == "exit" else controller["kind"]
        table.setdefault(branch_of(name), {})[kind] = controller["factors"]
    return {key: table[key] for key in sorted(table, key=key_order)}


def draw(table: dict[str, dict[str, list[float]]], title: str, output: Path) -> None:
    """Draw the table into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from megatron.training.stream_health.report import BranchHealth

    kinds = [(kind, name) for kind, name in _PANELS if any(kind in row for row in table.values())]
    height = 1.6 + 0.22 * len(table)
    figure, axes = plt.subplots(1, len(kinds) + 1, figsize=(3.6 * (len(kinds) + 1), height), layout="constrained")
    for axis, (kind, name) in zip(axes, kinds, strict=False):
        rows = [key for key in table if kind in table[key]]
        image = axis.imshow([table[key][kind] for key in rows], aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set(title=name, xlabel="stream", yticks=range(len(rows)), yticklabels=rows)
        axis.set_xticks(range(len(table[rows[0]][kind])))
        axis.tick_params(labelsize=8)
        figure.colorbar(image, ax=axis)
    effective = [BranchHealth(key, row["read"]).effective for key, row in table.items()]
    axes[-1].barh(range(len(table)), effective, color="tab:blue")
    axes[-1].set(title="streams read", xlim=(0, len(next(iter(table.values()))["read"])), xlabel="exp(entropy)")
    axes[-1].set(yticks=range(len(table)), yticklabels=list(table), ylim=(len(table) - 0.5, -0.5))
    axes[-1].tick_params(labelsize=8)
    figure.suptitle(title)
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        figure.savefig(unfinished, format="png", dpi=120)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        with quiet_imports():
            from megatron.training.checkpoints.errors import ConversionError
            from megatron.training.checkpoints.inspection import inspect_checkpoint
        try:
            report = inspect_checkpoint(args.checkpoint, args.step)
        except ConversionError as error:
            raise PlotError(str(error)) from error
        table = stream_table(report)
        draw(table, f"{report['folder']}: step {report['iteration']}", args.output)
        print(f"{args.output}: {len(table)} branches of step {report['iteration']}")
        if args.json:
            unfinished = args.json.with_name(f".{args.json.name}.{os.getpid()}.partial")
            unfinished.write_text(json.dumps({"step": report["iteration"], "branches": table}, indent=2) + "\n")
            os.replace(unfinished, args.json)
    except (PlotError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
