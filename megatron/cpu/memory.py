"""Memory lines on the CPU host: the process's resident memory where the trainer logs GPU memory.

`allocated` and `reserved` are the resident set size now, `max allocated` and `max reserved` its peak since the process
started (it cannot be reset: `reset_peak_memory_stats` does nothing), `total device memory used` is what the whole
machine uses. All in bytes, as CUDA gives them.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch

from megatron.cpu.replacements import Replacements


def resident_bytes(device: Any = None) -> int:
    """Resident set size of this process, in bytes."""
    return psutil.Process().memory_info().rss


_largest_seen = 0


def peak_resident_bytes(device: Any = None) -> int:
    """Largest resident set size of this process since it started, in bytes."""
    global _largest_seen
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
    # The kernel brings its peak up to date with a delay: never answer less than what was seen already.
    _largest_seen = max(_largest_seen, peak_bytes, resident_bytes())
    return _largest_seen


def memory_stats(device: Any = None) -> dict[str, int]:
    """The entries of CUDA's statistics that have a meaning here; the rest are absent."""
    resident, peak = resident_bytes(), peak_resident_bytes()
    stats = {}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{kind}.all.current"] = resident
        stats[f"{kind}.all.peak"] = peak
    stats["allocation.all.current"] = 0  # the host's allocator keeps no count
    stats["num_alloc_retries"] = 0
    stats["num_ooms"] = 0
    return stats


def _used_memory(device: Any = None) -> int:
    return psutil.virtual_memory().used


def _memory_info(device: Any = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing() -> Callable[..., None]:
    """A function for the peak of a process, which cannot be reset; a new one for every name (see device.py)."""
    return lambda *_, **__: None


_ANSWERS: dict[str, Any] = {
    "memory_allocated": resident_bytes,
    "max_memory_allocated": peak_resident_bytes,
    "memory_reserved": resident_bytes,
    "max_memory_reserved": peak_resident_bytes,
    "memory_stats": memory_stats,
    "device_memory_used": _used_memory,
    "mem_get_info": _memory_info,
    "reset_peak_memory_stats": _nothing(),
    "reset_max_memory_allocated": _nothing(),
}


def install_memory(replaced: Replacements) -> None:
    """Answer torch.cuda's memory questions for this process until `replaced` is restored."""
    for name, answer in _ANSWERS.items():
        replaced.set(torch.cuda, name, answer)
