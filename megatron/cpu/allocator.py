"""Keeps freed memory in the process, so that large tensors do not page-fault on every allocation.

    keep_freed_memory()

glibc hands freed blocks above 32 MiB back to the kernel at once, and smaller ones as soon as they lie at the end of its
heap; the kernel zeroes every page again at the next use. A tensor as large as a wide residual stream then costs 3 to 4
times the memory traffic of the operation that fills it, and a training step some ten thousand page faults
(docs/performance.md). The price of keeping it: up to 2 GiB of freed memory stays resident. Called by the training
scripts on a CPU host, and by the benchmark tools.

What always holds: a policy of the whole process, set once and not taken back; no effect on values. Does nothing where
the C library is not glibc, or where the user has set malloc up by glibc's own environment variables.
"""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER_MAPPED_BELOW_BYTES = 1 << 30
_KEPT_BYTES = (1 << 31) - 1
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make malloc serve blocks below 1 GiB from memory that it keeps.

    Returns: whether it does: False where the C library cannot, or one of malloc's own variables is set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OF_THE_USER):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, _NEVER_MAPPED_BELOW_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
