#!/usr/bin/env python3
"""Shows launched runs in a table: state, step, loss, speed, time left, last checkpoint, problems.

    python tools/runs.py                     the runs below runs/, renewed every 5 seconds until ^C
    python tools/runs.py runs/a runs/b --once
    python tools/runs.py /shared/runs --every 60

Each PLACE is a run folder (of scripts/launch.sh or a .sbatch file) or a folder of such folders. States: running,
waiting (to be started again, in SLURM's queue for example), silent (says that it runs, but no rank has moved for 2
minutes), finished, stopped (will not be started again; the problem says why), prepared (never started), damaged (a file
that says what becomes of the run cannot be read; the problem says which). A loss that is NaN or infinite, and a log
that cannot be read, are problems in every state.

What always holds: only run folders are read, nothing is written and no scheduler is asked. Exit status: 0, or 2 when
there is no run or a PLACE is no folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_pipe import run_tool

from megatron.run_control.errors import printable
from megatron.run_control.progress import Progress, find_runs, read_progress

if TYPE_CHECKING:
    from rich.table import Table

LONGEST_S = 86400  # between two readings; a sleep cannot be infinite
_COLORS = {"running": "green", "waiting": "yellow", "finished": "blue"}
_COLORS |= dict.fromkeys(("silent", "stopped", "damaged"), "red")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("places", nargs="*", metavar="PLACE", default=["runs"], help="default: runs")
    parser.add_argument("--once", action="store_true", help="print the table once and end")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between readings (default: 5)")
    args = parser.parse_args(argv)
    if not all(place.strip() for place in args.places):
        parser.error("a PLACE is empty: name a folder")
    if not 0 < args.every <= LONGEST_S:
        parser.error(f"--every {args.every:g}: more than 0 seconds and at most {LONGEST_S} are wanted")
    return args


def duration(seconds: float | None) -> str:
    """A time as a person says it: 45 s, 12 min, 3 h 20 min, 5 d 4 h."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def table(runs: list[Progress]) -> Table:
    """One row a run."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table("run", "state", box=box.SIMPLE_HEAD, expand=False)
    for heading in ("step", "loss", "tokens/s", "left", "checkpoint"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("problem", overflow="fold")
    for run in runs:
        saved = "-" if run.saved_step is None else f"{run.saved_step:,}, {duration(run.saved_ago)} ago"
        shown.add_row(
            Text(run.name),
            Text(run.state, style=_COLORS.get(run.state, "")),
            "-" if run.step is None else f"{run.step:,}/{run.steps:,}",
            "-" if run.loss is None else f"{run.loss:.4f}",
            "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            duration(run.seconds_left),
            saved,
            Text(run.problem or ""),
        )
    return shown


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    places = [Path(place) for place in args.places]
    if absent := [place for place in places if not place.is_dir()] if len(places) > 1 else []:
        print(f"error: {printable(', '.join(map(str, absent)))}: there is no such folder", file=sys.stderr)
        return 2
    if not find_runs(places):
        print(f"error: no run in {printable(', '.join(args.places))}: a run has a launch.json", file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.live import Live

    console = Console() if sys.stdout.isatty() else Console(width=160)
    if args.once:
        console.print(table([read_progress(path) for path in find_runs(places)]))
        return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(table([read_progress(path) for path in find_runs(places)]), refresh=True)
                time.sleep(args.every)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    run_tool(main)
