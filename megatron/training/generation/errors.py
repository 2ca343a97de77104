"""The one exception of text generation for what a user can put right.

What always holds: the message is complete in itself (what was found, what was wanted, what to do), so a tool prints it
without a traceback.
"""

from __future__ import annotations


class GenerationError(Exception):
    """A bad option, prompt or checkpoint; the message tells what to do."""
