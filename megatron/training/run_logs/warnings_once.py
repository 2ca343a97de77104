"""Warnings of this process that are printed once, whatever repeats them.

warn_once("tensorboard", "TensorBoard: cannot write to runs/a: No space left on device")
"""

from __future__ import annotations

_said: set[str] = set()


def warn_once(topic: str, line: str) -> None:
    """Print a line as a warning unless one of the same topic was printed before."""
    if topic in _said:
        return
    _said.add(topic)
    print(f"WARNING: {line}", flush=True)
