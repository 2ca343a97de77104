"""Runs a tool's main() so that a standard output that takes nothing more ends it in an orderly way.

    if __name__ == "__main__":
        run_tool(main)

| standard output | what is said | exit status |
|---|---|---|
| its reader goes away (`tools/runs.py | head -1`) | nothing | 1 |
| cannot be written (`>/dev/full`) | one line | 2 |
| is closed (`>&-`) | one line, before anything is done: a file opened later would be taken for it | 2 |

What always holds: no traceback and no "Exception ignored" for any of these, nor for ^C (status 130); a character that
the output's encoding lacks is escaped; else the status is what main() returns. What main() has written to files stays.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class OutputError(Exception):
    """Standard output takes nothing more; no OSError, so that no main() takes it for one of a file of its own."""


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error.strerror) from error


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Call main() and leave with its status."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_refused("it is closed"))
    _say_what_fails()
    try:
        status = _status_of(main)
        sys.stdout.flush()
    except OutputError as error:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1 if isinstance(error.__cause__, BrokenPipeError) else _refused(str(error))
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _say_what_fails() -> None:
    """Make sys.stdout raise OutputError; encoding and buffering (python -u) stay."""
    was = sys.stdout
    raw = _Output(was.fileno(), "w", closefd=False)
    unbuffered = isinstance(was.buffer, io.RawIOBase)
    sys.stdout = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=was.encoding,
        errors="backslashreplace",
        line_buffering=was.isatty(),
        write_through=unbuffered,
    )


def _status_of(main: Callable[[], int]) -> Any:
    try:
        return main()
    except SystemExit as left:  # argparse's
        return left.code


def _refused(reason: str) -> int:
    print(f"error: standard output cannot be written: {reason}. Send it to a file or to /dev/null", file=sys.stderr)
    return 2
