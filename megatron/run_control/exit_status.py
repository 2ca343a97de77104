"""The exit statuses of a training attempt, and what each one means for the next.

    if status == SAVED_ON_REQUEST: ...
    describe(76)    # "a rank made no progress and was stopped by the watchdog"

What always holds: 0, 2 and 78 end a run (done; options, data or a disk that another start cannot mend; left early);
everything else is started again, as long as the guard of attempts.py allows it.
"""

from __future__ import annotations

FINISHED = 0
BAD_OPTIONS = 2
SAVED_ON_REQUEST = 75  # EX_TEMPFAIL of sysexits.h: "the user is invited to retry"
HUNG = 76
LOST_PROCESS = 77
STOPPED_EARLY = 78

_MEANINGS = {
    FINISHED: "finished",
    BAD_OPTIONS: "an option, a corpus or a checkpoint cannot be used, or a checkpoint could not be saved",
    SAVED_ON_REQUEST: "saved and left on request (preemption or time limit)",
    HUNG: "a rank made no progress and was stopped by the watchdog",
    LOST_PROCESS: "a process was killed by a signal",
    STOPPED_EARLY: "stopped before its last step, by an option of its own",
}
FINAL = (FINISHED, BAD_OPTIONS)


def describe(status: int) -> str:
    """One sentence without a full stop; statuses from 129 are a shell's word for a signal."""
    if status in _MEANINGS:
        return _MEANINGS[status]
    if status > 128:
        return f"ended by signal {status - 128}"
    return f"failed with exit status {status}"
