"""When, where and from what the runs of an ablation were made, as a sentence for the report.

    provenance(runs)         # "Runs of 2026-11-29 (UTC), 1 process(es) a node, on 1 host(s), from commit 0123abc; ..."

What always holds: everything is read from the run folders' snapshots and attempts; what they do not say is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megatron.ablations.description import PlannedRun
from megatron.run_control.attempts import read_attempts
from megatron.run_control.run_folder import RunFolder

_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _commit(run: RunFolder) -> str | None:
    """The short commit of a launch, marked where files differed from it."""
    commit = _read(run.snapshot / "commit.txt").partition("\n")[0].strip()
    if len(commit) != 40:
        return None
    return commit[:10] + (" with changes" if _read(run.snapshot / "uncommitted.diff") else "")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def provenance(measured: Sequence[PlannedRun]) -> str | None:
    """A sentence about the runs that a report counts; None without one."""
    runs = [RunFolder(run.folder) for run in measured if RunFolder(run.folder).launch.exists()]
    if not runs:
        return None
    attempts = [attempt for run in runs for attempt in read_attempts(run)]
    days = sorted({_day(attempt.started) for attempt in attempts})
    processes = sorted({run.settings()["processes"] for run in runs})
    said = f"Runs of {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") + " (UTC)"
    said += f", {' or '.join(map(str, processes))} process(es) a node, on {len({a.host for a in attempts})} host(s)"
    commits = sorted({commit for run in runs if (commit := _commit(run))})
    said += f", from commit {', '.join(commits)}" if commits else ""
    lines = {line for run in runs for line in _read(run.snapshot / "packages.txt").splitlines()}
    packages = sorted(line.replace("==", " ") for line in lines if line.partition("==")[0] in _PACKAGES)
    return said + (f"; {', '.join(packages)}" if packages else "") + "."
