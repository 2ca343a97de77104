"""Keeps freed memory in the process, so that large tensors do not page-fault on every allocation.

    keep_freed_memory()
    with stock_malloc(): ...    # for measurements: as in a process that never called it

glibc hands freed blocks above 32 MiB back to the kernel at once, and smaller ones as soon as they lie at the end of its
heap; the kernel zeroes every page again at the next use. A tensor as large as a wide residual stream then costs 3 to 4
times the memory traffic of the operation that fills it, and a training step some ten thousand page faults
(docs/performance.md). The price of keeping it: up to 2 GiB of freed memory stays resident. Called by the training
scripts on a CPU host, and by the benchmark tools.

What always holds: a policy of the whole process, never taken back but inside `stock_malloc()`; no effect on values.
Does nothing where the C library is not glibc, or where the user has set malloc up by glibc's own environment variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER_MAPPED_BELOW_BYTES = 1 << 30
_KEPT_BYTES = (1 << 31) - 1
_STOCK_MAPPED_FROM_BYTES = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX, where the threshold that glibc adapts ends
_STOCK_TRIM_BYTES = 2 * _STOCK_MAPPED_FROM_BYTES  # glibc's own rule
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

_kept = False


def keep_freed_memory() -> bool:
    """Make malloc serve blocks below 1 GiB from memory that it keeps.

    Returns: whether it does: False where the C library cannot, or one of malloc's own variables is set.
    """
    global _kept
    if _obstacle():
        return False
    _kept = _set_thresholds(_NEVER_MAPPED_BELOW_BYTES, _KEPT_BYTES)
    return _kept


def why_not_kept() -> str:
    """Why `keep_freed_memory()` has returned False, as part of a sentence."""
    return _obstacle() or f"glibc {platform.libc_ver()[1]} refuses the thresholds"


@contextlib.contextmanager
def stock_malloc() -> Iterator[None]:
    """Context in which malloc treats blocks as in a process that never called `keep_freed_memory()`.

    Emulates the state that glibc reaches by itself once blocks of nearly 32 MiB have been freed: larger ones are
    mapped and given back every time, smaller ones come from the heap, whose end is given back above 64 MiB. (Where only
    smaller ones have been freed, glibc has smaller thresholds and faults more. A block of 32 to 64 MiB that it finds
    now and then at the end of its heap, depending on what was freed before, is mapped here.)

    Every free piece of the heap that could serve a larger block is set aside meanwhile, with its pages: they are
    neither used inside nor faulted in again afterwards. `malloc_trim` would not do: free pieces below a live block stay
    in the heap, and serve the second call.

    RuntimeError outside `keep_freed_memory()`'s policy, inside another such context, and where malloc does not obey.
    """
    global _kept
    if not _kept:
        raise RuntimeError("stock_malloc() is for a process that keeps freed memory, and cannot be nested")
    aside: list[int] = []
    _kept = False
    try:
        _set_thresholds(_STOCK_MAPPED_FROM_BYTES, _STOCK_TRIM_BYTES)
        _set_aside(aside)
        yield
    finally:
        _kept = _set_thresholds(_NEVER_MAPPED_BELOW_BYTES, _KEPT_BYTES)  # first, else the blocks would be given back
        for block in aside:
            _glibc().free(block)


def _obstacle() -> str:
    if platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc"
    return next((f"{name} is set" for name in _OF_THE_USER if name in os.environ), "")


class _HeapInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>: `hblks` counts mapped blocks, `fordblks` the free bytes of the heap."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


@functools.cache
def _glibc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    if hasattr(libc, "mallinfo2"):  # since 2.33
        libc.mallinfo2.restype = _HeapInfo
    return libc


def _set_thresholds(mapped_from: int, trimmed_above: int) -> bool:
    mallopt = _glibc().mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped_from) and mallopt(_M_TRIM_THRESHOLD, trimmed_above))


def _set_aside(blocks: list[int]) -> None:
    """Take blocks from the heap until one of 32 MiB is mapped: then none of that size or above is free there."""
    libc = _glibc()
    if not hasattr(libc, "mallinfo2"):
        raise RuntimeError(f"glibc {platform.libc_ver()[1]} has no mallinfo2")
    before = libc.mallinfo2()
    for _ in range(before.fordblks // _STOCK_MAPPED_FROM_BYTES + 1):
        block = libc.malloc(_STOCK_MAPPED_FROM_BYTES)
        if libc.mallinfo2().hblks > before.hblks:
            libc.free(block)
            return
        blocks.append(block)
    raise RuntimeError("malloc does not map blocks of 32 MiB: another malloc than glibc's is loaded")
