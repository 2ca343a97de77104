"""Runs an ablation on this machine, one run after another or several at a time, through scripts/launch.sh.

    failed = Runner(ablation, repository, parallel=1).run()     # names of the runs that did not finish

A run that has finished is never started again; one that was interrupted goes on from its checkpoint; one that an
earlier, killed `run` left at work is waited for. The first ^C (or TERM) lets the trainers save and starts nothing more;
the second ends them at once.

What always holds: a run folder is never worked on by two launches: a launch holds the run's lock (state.py) for as long
as it, or a process of it, lives.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron.ablations.description import Ablation, PlannedRun
from megatron.ablations.state import end_orphans, launch_lock, state_of, why_stopped
from megatron.run_control.progress import read_progress
from megatron.run_control.run_folder import write_whole

POLL_S = 0.5
INTERRUPTED = 130


def recipe_file(run: PlannedRun) -> Path:
    """Where the resolved recipe of a run lies; a launch is given this file."""
    return run.folder.parent / "recipes" / f"{run.name}.yaml"


def write_recipe(run: PlannedRun) -> Path:
    """Write the resolved recipe of a run; returns the file."""
    file = recipe_file(run)
    write_whole(file, f"# Written by tools/ablate.py.\n{run.recipe.as_yaml()}")
    return file


@dataclass
class Launch:
    """A launch that is at work; `process` is None for one that an earlier `run` left behind."""

    run: PlannedRun
    process: subprocess.Popen | None
    output: IO[str] | None
    task: TaskID


@dataclass
class Runner:
    """The launches of an ablation's runs on this machine."""

    ablation: Ablation
    repository: Path
    parallel: int = 1
    skipped: Sequence[str] = ()  # names of runs that are at work elsewhere
    console: Console = field(default_factory=lambda: Console(stderr=False))

    def __post_init__(self) -> None:
        self._active: list[Launch] = []
        self._interrupts = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
        )

    def run(self) -> tuple[int, list[str]]:
        """Run what is not finished. Returns an exit status (0, 1 a run failed, 130 interrupted) and what failed."""
        queue = [run for run in self.ablation.runs if run.name not in self.skipped]
        done = [run for run in queue if state_of(run) == "finished"]
        queue = [run for run in queue if run not in done]
        self._say(f"{len(done)} of {len(self.ablation.runs)} runs are finished, {len(queue)} to do")
        failed: list[str] = []
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._progress:
                overall = self._progress.add_task(self.ablation.name, total=len(self.ablation.runs), note="runs")
                self._progress.update(overall, completed=len(done))
                while self._active or (queue and not self._interrupts):
                    while queue and len(self._active) < self.parallel and not self._interrupts:
                        self._start(queue.pop(0))
                    for launch in [launch for launch in self._active if self._has_ended(launch)]:
                        failed += self._end(launch, queue)
                        self._progress.update(overall, completed=self._finished())
                    time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return (INTERRUPTED if self._interrupts else 1 if failed else 0), failed

    def _finished(self) -> int:
        return sum(state_of(run) == "finished" for run in self.ablation.runs)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _start(self, run: PlannedRun) -> None:
        task = self._progress.add_task(run.name, total=None, note="starting")
        lock = launch_lock(run)
        if lock is None:
            self._say(f"{run.name}: an earlier launch is still at work, waiting for it")
            self._active.append(Launch(run, None, None, task))
            return
        orphans = end_orphans(run)
        if orphans:
            self._say(f"{run.name}: ended {orphans} processes that a killed launch had left behind")
        self._say(f"{run.name}: {'goes on' if run.folder.exists() else 'starts'}")
        output = (run.folder.parent / "locks" / f"{run.name}.out").open("w+")
        process = subprocess.Popen(
            [str(self.repository / "scripts" / "launch.sh"), str(write_recipe(run)), "--run-dir", str(run.folder)],
            env={"PYTHON": sys.executable, **os.environ},
            cwd=self.repository,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,  # ^C is passed on once, by _on_signal
        )
        os.close(lock)
        self._active.append(Launch(run, process, output, task))

    def _has_ended(self, launch: Launch) -> bool:
        view = read_progress(launch.run.folder) if (launch.run.folder / "launch.json").exists() else None
        if view is not None and view.step is not None:
            note = "" if view.loss is None else f"loss {view.loss:.4f}"
            note += "" if view.tokens_per_second is None else f"  {view.tokens_per_second:,.0f} tokens/s"
            self._progress.update(launch.task, completed=view.step, total=view.steps, note=note)
        if launch.process is not None:
            return launch.process.poll() is not None
        lock = launch_lock(launch.run)
        if lock is not None:
            os.close(lock)
        return lock is not None or bool(self._interrupts)

    def _end(self, launch: Launch, queue: list[PlannedRun]) -> list[str]:
        """Take an ended launch away; returns the run's name if it failed."""
        run = launch.run
        self._active.remove(launch)
        self._progress.remove_task(launch.task)
        state = state_of(run)
        lines = []
        if launch.output is not None:
            launch.output.seek(0)
            lines = launch.output.read().splitlines()[-5:]
            launch.output.close()
        if state == "finished":
            view = read_progress(run.folder)
            self._say(f"{run.name}: finished, step {view.step}, loss {view.loss}")
            return []
        if self._interrupts:
            self._say(f"{run.name}: {state}, at step {read_progress(run.folder).saved_step or 0}")
            return []
        if launch.process is None:
            queue.insert(0, run)  # what was waited for has ended: it is this command's turn
            return []
        self._say(f"{run.name}: failed: {why_stopped(run) if state == 'stopped' else 'its launch ended'}")
        for line in lines:
            self._say(f"    {line}")
        return [run.name]

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupts += 1
        passed_on = signal.SIGINT if self._interrupts == 1 else signal.SIGTERM
        self._say(
            "interrupted: the trainers save and leave; interrupt once more to end them at once"
            if self._interrupts == 1
            else "ending the trainers"
        )
        _for_each_process(self._active, lambda process: process.send_signal(passed_on))


def _for_each_process(launches: Sequence[Launch], act: Callable[[subprocess.Popen], None]) -> None:
    for launch in launches:
        if launch.process is not None and launch.process.poll() is None:
            act(launch.process)
