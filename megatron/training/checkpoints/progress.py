"""The progress bar of a conversion, and how much memory it took.

    with MemoryMeter() as meter, progress_bar(total_bytes, "widen") as bar:
        meter.make_room(tensor.nbytes, most=layer)   # before a tensor: free memory in pieces does not count twice
        bar.update(tensor.nbytes)
    meter.peak_bytes                     # the most that the process held above what it held before

What always holds: the bar goes to standard error; memory is what the kernel counted (VmHWM), not an estimate.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm


def _status(name: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def reuse_memory() -> None:
    """Let the C library keep freed memory for the next tensor: fresh pages cost more than the copy into them."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def _give_back_free_memory() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class MemoryMeter:
    """Measures the peak of this process's resident memory inside a block, above what it was at its start."""

    def __enter__(self) -> MemoryMeter:
        _give_back_free_memory()  # it would hide what is taken
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current value
        self._before = (_status("VmRSS") or 0) if Path("/proc/self/status").exists() else 0
        self.peak_bytes = 0
        return self

    def make_room(self, nbytes: int, *, most: int) -> None:
        """Give free memory back to the system unless `nbytes` more stay within `most`.

        A freed tensor whose memory holds a small object by now has no room for the next one of its size: without this,
        what is held would depend on where small objects happen to lie.
        """
        if not Path("/proc/self/status").exists():
            return
        if (_status("VmRSS") or 0) - self._before + nbytes > most:
            _give_back_free_memory()

    def __exit__(self, *error: object) -> None:
        if Path("/proc/self/status").exists():
            peak = _status("VmHWM") or 0
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.peak_bytes = max(peak - self._before, 0)


def progress_bar(total: int, description: str, *, shown: bool | None = None) -> Any:
    """Return a bar over bytes; without `shown` it is drawn where standard error is a terminal."""
    hidden = not sys.stderr.isatty() if shown is None else not shown
    return tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=description, disable=hidden)
