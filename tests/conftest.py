"""The order of the test files: those that take longest come first, so that no worker is left with one at the end.

`./scripts/test.sh` hands whole files to its workers in the order of collection (--no-loadscope-reorder).

What always holds: what the tests start can be interrupted, also where a shell started them in the background.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

LONGEST_FIRST = (
    "test_ablate_run.py",
    "test_quickstart.py",
    "test_slurm.py",
    "test_wide_layouts.py",
    "test_hybrid_layouts.py",
    "test_quickstart_hybrid.py",
    "test_launch.py",
    "test_checkpoint_faults.py",
    "test_checkpoint_refusals.py",
    "test_exact_resume.py",
    "test_shortcut_moe_layouts.py",
    "test_generate.py",
    "test_wide_resume.py",
    "test_overlay.py",
    "test_cpu_layouts.py",
    "test_convert_trained.py",
    "test_checkpoint_kills.py",
    "test_streamwise_residual_backends.py",
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `./scripts/test.sh &`: every process would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file; the order within a file stays."""
    absent = [name for name in LONGEST_FIRST if not (Path(__file__).parent / name).is_file()]
    assert not absent, f"{Path(__file__).name} names files that are not there: {absent}"
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
