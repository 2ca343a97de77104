"""The error that the launching tools turn into one line and exit status 2."""

from __future__ import annotations


class LaunchError(ValueError):
    """A recipe, an option or a run folder that cannot be used; the message says what was found and what to do."""


class GuardError(LaunchError):
    """A run that the guard of attempts.py does not start again."""
