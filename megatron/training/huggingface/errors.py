"""The one exception of Hugging Face conversion for what a user can put right.

What always holds: the message is complete in itself (what was found, what was wanted, what to do), so a tool prints it
without a traceback and ends with status 2.
"""

from __future__ import annotations

from megatron.training.checkpoints.errors import ConversionError


class HuggingFaceError(ConversionError):
    """A folder or checkpoint that cannot be converted; the message tells what to do."""
