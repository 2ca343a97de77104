"""The numbers that a launch takes from the environment, each checked before anything is written.

    check_limits()          # every variable, and where the nodes meet; prepare calls it
    restart_limit()         # MAX_RESTARTS_WITHOUT_PROGRESS, 3
    watchdog_limits()       # WATCHDOG_SECONDS, WATCHDOG_START_SECONDS: 900, 3600 seconds, infinite where they are 0

What always holds: an empty variable counts as not set; a value that cannot be used is a LaunchError that names the
variable, the value and what is wanted.
"""

from __future__ import annotations

import math
import os

from megatron.run_control.errors import LaunchError

DEFAULT_RESTARTS = 3
_LONGEST_WAIT_S = 10**9  # flock, which waits for LOCK_SECONDS, knows no much larger number and would not lock at all


def whole_number(text: str) -> int | None:
    """The whole number from 0 that a text says in ASCII digits; None for any other text, and for one of hundreds of
    digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def restart_limit() -> int:
    """How many attempts in a row may end without a new checkpoint."""
    name = "MAX_RESTARTS_WITHOUT_PROGRESS"
    text = os.environ.get(name) or str(DEFAULT_RESTARTS)
    number = whole_number(text)
    if not number:
        raise LaunchError(f"{name} is {text!r}, a whole number from 1 is wanted")
    return number


def watchdog_limits() -> tuple[float, float]:
    """Seconds after which a rank counts as hung, in training and before its first step."""
    return _seconds("WATCHDOG_SECONDS", 900), _seconds("WATCHDOG_START_SECONDS", 3600)


def check_limits() -> None:
    """Raise LaunchError for the first variable that cannot be used."""
    restart_limit()
    watchdog_limits()
    wait = os.environ.get("LOCK_SECONDS") or "0"  # read by scripts/slurm/lib.sh
    number = whole_number(wait)
    if number is None or number > _LONGEST_WAIT_S:
        raise LaunchError(f"LOCK_SECONDS is {wait!r}, a whole number of seconds up to {_LONGEST_WAIT_S} is wanted")
    if os.environ.get("MASTER_ADDR") is None:
        return  # one node, whose processes find each other
    port = os.environ.get("MASTER_PORT", "")
    if not 1 <= (whole_number(port) or 0) <= 65535:
        raise LaunchError(
            f"MASTER_PORT is {port!r} and MASTER_ADDR is set, a port from 1 to 65535 is wanted: set both or neither"
        )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise LaunchError(f"{name} is {text!r}, a number of seconds is wanted, or 0 for no limit")
    return seconds or math.inf
