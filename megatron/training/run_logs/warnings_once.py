"""Warnings of a run that are printed once, whatever repeats them.

warn_once("tensorboard", "TensorBoard: cannot write to runs/a: No space left on device")
forget_warnings()        # at the start of the next run in this process
"""

from __future__ import annotations

_said: set[str] = set()


def warn_once(topic: str, line: str) -> None:
    """Print a line as a warning unless one of the same topic was printed before."""
    if topic in _said:
        return
    _said.add(topic)
    print(f"WARNING: {line}", flush=True)


def forget_warnings() -> None:
    """Begin a run that may warn of the same things again."""
    _said.clear()
