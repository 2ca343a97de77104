"""The one exception of loading and saving checkpoints for what a user can put right.

What always holds: the message is complete in itself, so a program prints it without a traceback and ends with status 2.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, or could not be saved; the message tells what to do.

    `on_all_ranks` says that every process raises the same, so that one of them may speak for all.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
