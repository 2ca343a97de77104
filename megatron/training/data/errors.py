"""The one exception that data preparation raises for what a user can put right.

    try: ...
    except DataError as error: print(f"error: {error}", file=sys.stderr); sys.exit(2)

What always holds: the message is complete in itself (what was found and where, what was wanted, what to do), so a tool
prints it without a traceback.
"""

from __future__ import annotations


class DataError(Exception):
    """Bad input, a bad flag, or a corpus that cannot serve the run; the message tells what to do."""
