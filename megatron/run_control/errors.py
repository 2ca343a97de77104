"""The errors that the launching tools turn into one line and exit status 2.

except (LaunchError, OSError) as error:
    print(f"error: {said(error)}", file=sys.stderr)
"""

from __future__ import annotations

import os
from pathlib import Path


class LaunchError(ValueError):
    """A recipe, an option or a run folder that cannot be used; the message says what was found and what to do."""


class GuardError(LaunchError):
    """A run that the guard of attempts.py does not start again."""


def printable(text: str) -> str:
    """The text as one line, with what a terminal would obey, or could not show, escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def said(error: BaseException) -> str:
    """The error as a line for a user: a file's name and what the system says of it, without its error number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return printable(text)


def why_no_folder(folder: Path, error: OSError) -> str:
    """Why a folder could not be made or written: what stands in its way, where the system's words do not name it."""
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not there.is_dir():
        return f"{there} is no folder"
    return f"{there} takes no new file" if isinstance(error, FileNotFoundError) else said(error)
