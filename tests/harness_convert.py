"""Trained checkpoints to convert, and runs that go on from converted ones, in two launches of the real trainer.

    losses = train_all(1, {"gpt": [*DENSE, "--save", ...]}, folder)       # name -> losses of every step
    assert_same_tensors(one, other)                                        # weights and optimizer states, bit for bit

What always holds: dropout is 0 and the corpus is the mock one, so equal models have equal losses whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from harness_layouts import BASE, MODELS, launch_entries, read_result

from megatron.training.checkpoints.open_checkpoint import open_reader

_LEFT_OUT = ("--no-save-optim", "--no-save-rng")
COMMON = [
    *(option for option in BASE if option not in _LEFT_OUT),
    *("--lr", "0.001", "--min-lr", "0.001", "--weight-decay", "0.1", "--lr-decay-iters", "10"),
    "--use-checkpoint-opt-param-scheduler",  # a longer run's schedule is another one
]


def options(model: str, steps: int, *more: str) -> list[str]:
    """Return the command line of a model of harness_layouts that trains to a step."""
    return [*COMMON, *MODELS[model], "--train-iters", str(steps), *more]


def train_all(processes: int, runs: Mapping[str, Sequence[str]], folder: Path) -> dict[str, list[float]]:
    """Run all in one launch, one after another; returns the losses of the steps that each took."""
    launch_entries(processes, [{"name": name, "argv": list(argv)} for name, argv in runs.items()], folder)
    return {name: read_result(name, folder).losses for name in runs}


def assert_same_tensors(one: Path, other: Path) -> int:
    """Assert that two checkpoints hold the same tensors, bit for bit; returns how many."""
    with open_reader(one) as left, open_reader(other) as right:
        assert set(left.entries) == set(right.entries), set(left.entries) ^ set(right.entries)
        for entry, info in left.entries.items():
            assert right.entries[entry] == info, f"{entry} is {right.entries[entry]}, it was {info}"
            assert torch.equal(left.read(entry), right.read(entry)), f"{entry} has other bits"
        return len(left.entries)
