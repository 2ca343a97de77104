"""Keeps freed memory in the process, so that large tensors do not page-fault on every allocation.

    keep_freed_memory()

glibc hands blocks above 32 MiB back to the kernel as soon as they are freed, and the kernel zeroes every page again at
the next use. A tensor as large as a wide residual stream then costs 3 to 4 times the memory traffic of the operation
that fills it (docs/performance.md). The price of keeping it: up to 2 GiB of freed memory stays resident.

What always holds: a policy of the whole process, set once and not taken back; no effect on values. Does nothing where
the C library is not glibc.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER_MAPPED_BELOW_BYTES = 1 << 30
_KEPT_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Make malloc serve blocks below 1 GiB from memory that it keeps. False where the C library cannot do that."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, _NEVER_MAPPED_BELOW_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
