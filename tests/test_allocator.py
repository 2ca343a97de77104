"""megatron/cpu/allocator.py: freed memory stays in the process, and inside `stock_malloc()` it does not.

    pytest tests/test_allocator.py

What is counted are page faults: of a block that is taken, filled and freed. Each test has a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cpu.allocator import _OF_THE_USER

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES_OF_64_MIB = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
HEAD = """
import ctypes, json, resource
from types import SimpleNamespace
from megatron.cpu import allocator
from megatron.cpu.allocator import keep_freed_memory, stock_malloc

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.memset.argtypes, libc.memset.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is a page

def filled(mib):
    block = libc.malloc(mib << 20)
    libc.memset(block, 1, mib << 20)
    return block

def faults(mib, calls=1):
    found = []
    for _ in range(calls):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        libc.free(filled(mib))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return found
"""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OF_THE_USER),
    reason="malloc is not glibc's, or set up by its own variables",
)


def answer(program: str) -> Any:
    """What a program prints, behind HEAD, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}\n{program}"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_blocks_above_32_mib_fault_inside_the_context_alone_and_nothing_faults_again_behind_it() -> None:
    before, inside, behind, inside_again, behind_again = answer(
        "assert keep_freed_memory()\n"
        "faults(200, 3)  # room for what follows, also where something small lies in it\n"
        "found = [faults(64, 2)]\n"
        "for _ in range(2):\n"
        "    with stock_malloc():\n"
        "        found.append(faults(64, 3))\n"
        "    found.append(faults(64, 2))\n"
        "print(json.dumps(found))"
    )
    assert max(*before, *behind, *behind_again) < 50
    assert min(*inside, *inside_again) >= PAGES_OF_64_MIB


def test_blocks_fault_as_in_a_process_that_never_set_malloc() -> None:
    sizes = (1, 8, 24, 31, 33, 48, 64, 200)
    measured = f"found = [faults(mib, 4)[-1] for mib in {sizes}]"
    fresh = answer(f"{measured}\nprint(json.dumps(found))")
    toggled = answer(
        f"assert keep_freed_memory()\nfaults(300)\nwith stock_malloc():\n    {measured}\nprint(json.dumps(found))"
    )
    assert toggled == pytest.approx(fresh, abs=20)
    assert max(toggled[:4]) < 20, "a block below 32 MiB was given back"


def test_a_free_piece_below_a_live_block_is_not_used_inside() -> None:
    """The case that malloc_trim leaves: it empties such a piece, which then serves every call but the first."""
    inside, behind = answer(
        "assert keep_freed_memory()\n"
        "below, live = filled(512), filled(16)\n"
        "libc.free(below)\n"
        "with stock_malloc():\n    inside = faults(64, 3)\n"
        "print(json.dumps([inside, faults(200, 2)]))"
    )
    assert min(inside) >= PAGES_OF_64_MIB
    assert max(behind) < 50


def test_the_policy_is_back_after_an_error_inside() -> None:
    assert answer(
        "assert keep_freed_memory()\nfaults(200, 3)\n"
        "try:\n    with stock_malloc():\n        1 / 0\n"
        "except ZeroDivisionError:\n    pass\n"
        "print(json.dumps(max(faults(64, 3)) < 50))"
    )


def test_a_process_that_keeps_nothing_and_a_context_in_a_context_are_refused() -> None:
    messages = answer(
        "messages = []\n"
        "def enter():\n"
        "    try:\n        with stock_malloc():\n            pass\n"
        "    except RuntimeError as error:\n        messages.append(str(error))\n"
        "enter()\n"
        "assert keep_freed_memory()\n"
        "with stock_malloc():\n    enter()\n"
        "enter()\n"
        "print(json.dumps(messages))"
    )
    assert messages == ["stock_malloc() is for a process that keeps freed memory, and cannot be nested"] * 2


def test_a_malloc_that_does_not_obey_is_refused_and_freed_memory_kept_again() -> None:
    message, kept = answer(
        "assert keep_freed_memory()\nfaults(200, 3)\n"
        "real = allocator._glibc()\n"
        "never_maps = SimpleNamespace(mallopt=real.mallopt, malloc=lambda size: real.malloc(1), free=real.free,\n"
        "                             mallinfo2=real.mallinfo2)\n"
        "allocator._glibc = lambda: never_maps\n"
        "try:\n    with stock_malloc():\n        pass\n"
        "except RuntimeError as error:\n    message = str(error)\n"
        "print(json.dumps([message, max(faults(64, 3)) < 50]))"
    )
    assert message == "malloc does not map blocks of 32 MiB: another malloc than glibc's is loaded"
    assert kept


@pytest.mark.parametrize("name", _OF_THE_USER)
def test_malloc_that_the_user_has_set_up_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.check=0" if name == "GLIBC_TUNABLES" else "67108864")
    kept, reason = answer("print(json.dumps([keep_freed_memory(), allocator.why_not_kept()]))")
    assert not kept
    assert reason == f"{name} is set"
