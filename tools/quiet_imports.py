"""Keeps a tool's stderr for the tool: megatron's and torch's notes on what is not installed are not its user's concern.

    with quiet_imports():
        import megatron.training

What always holds: only what is said while importing is silenced; errors are not, and later warnings are not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence warnings, and log records below ERROR, for the imports in the block."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
