"""Run pretrain_gpt.py as a user does and read back what it computed.

    run = pretrain([*TINY_GPT, "--train-iters", "4"], folder)          # one process; 2 ranks with processes=2
    run.losses            # {1: 5.57..., 2: ...}: the exact fp32 training loss of every step
    run.log               # everything it printed
    pretrain_killed_after(step, options, folder)                        # SIGKILL as soon as that step's line appears

What always holds: `losses` come from the TensorBoard events (the log line rounds, and averages its second step after a
start), so equal values are equal bits; a run that should succeed and does not fails the test with its log's end. A run
is a process of its own, forked from one that has the trainer imported (harness_preloaded) unless it is killed, gets an
environment or fails on several ranks: those start as from a shell, the latter under torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness_preloaded import can_preload, run_preloaded, run_preloaded_ranks

ROOT = Path(__file__).resolve().parents[1]

# A GPT that takes about 30 ms a step. Dropout is upstream's 0.1.
TINY_GPT = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "0.001", "--min-lr", "0.0001", "--lr-warmup-iters", "2", "--lr-decay-iters", "20"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--weight-decay", "0.1"),
    *("--eval-interval", "1000", "--eval-iters", "1", "--log-interval", "1", "--seed", "7"),
]
# The same for pretrain_mamba.py: one layer of each kind, with a shared expert.
TINY_HYBRID = [
    *TINY_GPT[2:],
    *("--hybrid-layer-pattern", "M*-E", "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--moe-shared-expert-intermediate-size", "64", "--mamba-head-dim", "16", "--mamba-state-dim", "16"),
    *("--mamba-num-groups", "2"),
]
_STEP_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|")


@dataclass
class Run:
    """A finished (or killed) run."""

    status: int
    log: str
    losses: dict[int, float]

    @property
    def logged_steps(self) -> list[int]:
        """Steps that have a line in the log."""
        return [int(step) for step in _STEP_LINE.findall(self.log)]


def _command(options: Sequence[str], processes: int, script: str) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, str(ROOT / script), *options]


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline", **extra}


def exact_losses(events: Path, tag: str = "lm loss") -> dict[int, float]:
    """Every value of a scalar in a TensorBoard folder, by step; of a step written twice the later one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
    reader.Reload()
    if tag not in reader.Tags()["scalars"]:
        return {}
    return {event.step: event.value for event in reader.Scalars(tag)}


def pretrain(
    options: Sequence[str],
    folder: Path,
    *,
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
    expect_status: int = 0,
    script: str = "pretrain_gpt.py",
) -> Run:
    """Run the script to its end in `folder`; its TensorBoard events go to a new folder there."""
    events = Path(tempfile.mkdtemp(prefix="events-", dir=folder))
    options = [*options, "--tensorboard-dir", str(events)]
    command = [str(ROOT / script), *options]
    if not environment and can_preload(_environment({})) and (processes == 1 or expect_status == 0):
        with tempfile.NamedTemporaryFile() as log:
            where = command, _environment({}), folder, Path(log.name)
            status = run_preloaded(*where) if processes == 1 else run_preloaded_ranks(processes, *where)
            said = log.read().decode()
    else:  # the first status of several processes would not be torchrun's
        done = subprocess.run(
            _command(options, processes, script),
            cwd=folder,
            env=_environment(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        status, said = done.returncode, done.stdout
    assert status == expect_status, f"{script} ended with status {status}, not {expect_status}:\n{said[-6000:]}"
    return Run(status, said, exact_losses(events))


def pretrain_killed_after(
    step: int, options: Sequence[str], folder: Path, *, processes: int = 1, script: str = "pretrain_gpt.py"
) -> Run:
    """Start the script and SIGKILL all its processes as soon as the line of `step` appears in its log."""
    events = Path(tempfile.mkdtemp(prefix="events-", dir=folder))
    process = subprocess.Popen(
        _command([*options, "--tensorboard-dir", str(events)], processes, script),
        cwd=folder,
        env=_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = _STEP_LINE.search(line)
        if found and int(found.group(1)) >= step:
            # The whole tree, parent first so that a launcher restarts none: its workers have sessions of their own.
            parent = psutil.Process(process.pid)
            for member in [parent, *parent.children(recursive=True)]:
                member.kill()
            break
    lines += process.stdout.readlines()
    status = process.wait()
    log = "".join(lines)
    assert status == -signal.SIGKILL, f"{script} ended by itself (status {status}) before step {step}:\n{log[-6000:]}"
    return Run(status, log, exact_losses(events))


RESUME_STEPS = 20


def assert_resumes_bit_equal(
    options: Sequence[str],
    folder: Path,
    *,
    whole: Run | None = None,
    kill_after: int = 7,
    save_interval: int = 5,
    script: str = "pretrain_gpt.py",
) -> None:
    """Kill a run of RESUME_STEPS steps, start it again, and compare every later loss with an uninterrupted run's."""
    whole = whole or pretrain(options, folder, script=script)
    assert sorted(whole.losses) == list(range(1, RESUME_STEPS + 1)), "not every step's loss was written"
    saving = [*options, "--save", "checkpoints", "--load", "checkpoints", "--save-interval", str(save_interval)]
    killed = pretrain_killed_after(kill_after, saving, folder, script=script)
    assert RESUME_STEPS not in killed.logged_steps, "the run had ended before it could be killed"
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved in range(save_interval, RESUME_STEPS, save_interval), f"nothing useful was saved: {saved}"
    resumed = pretrain(saving, folder, script=script)
    expected = {step: loss for step, loss in whole.losses.items() if step > saved}
    assert resumed.losses == expected, "the resumed run's losses are not those of the uninterrupted run"
