"""Runs a tool's main() so that a reader that goes away (`tools/runs.py | head -1`) ends it quietly.

    if __name__ == "__main__":
        run_tool(main)

What always holds: no traceback and no "Exception ignored" for a closed standard output; the exit status is then 1, as
rich has it for its tables, and else what main() returns. What main() has written to files stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Call main() and leave with its status."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
