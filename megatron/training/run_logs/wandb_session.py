"""Starts the wandb run, in the thread that feeds it: online where it can be, on disk where it cannot.

    run = start_session(SessionPlan(project="streams", folder="runs/a", ...))

What always holds: no prompt is ever shown; no call waits longer than the plan's timeout and wandb's own retries; a
fallback to the disk is said once, with what to do about it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.training.run_logs.warnings_once import warn_once

LATER = "the run is kept on disk; upload it later with: wandb sync"


@dataclass(frozen=True)
class SessionPlan:
    """What `wandb.init` is told. Id, group, tags, job type and mode are in wandb's environment variables."""

    project: str
    folder: str
    name: str | None = None
    entity: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    timeout: float = 30.0


def _writable(folder: str) -> str | None:
    """Create the folder and return why it cannot be written to, or None."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _why_offline(wandb: Any) -> str | None:
    """Return why the server cannot be used, or None; asks it for the login where there is one."""
    if wandb.setup().settings.mode not in ("online", "shared", "run"):
        return None
    try:
        return None if wandb.login(prompt=False) else "nobody is logged in (wandb login)"
    except Exception as error:
        return _first_line(error)


def start_session(plan: SessionPlan, warn: Callable[[str, str], None] = warn_once) -> Any:
    """Return wandb's run.

    Args:
        plan: what to start.
        warn: gets (topic, line) of what has to be said.

    Raises:
        ImportError: wandb is not installed.
        Exception: wandb cannot even write to a disk.
    """
    import wandb

    reason = _writable(plan.folder)
    folder = plan.folder
    if reason is not None:
        folder = tempfile.mkdtemp(prefix="wandb-")
        warn("wandb-folder", f"wandb: cannot write to {plan.folder} ({reason}); this run's files go to {folder}")
    options: dict[str, Any] = {"init_timeout": plan.timeout, "finish_timeout": plan.timeout}
    known = getattr(wandb.Settings, "model_fields", {})
    settings = wandb.Settings(**{name: value for name, value in options.items() if name in known})
    what: dict[str, Any] = {name: getattr(plan, name) for name in ("project", "entity", "name", "config")}
    what["dir"] = folder
    reason = _why_offline(wandb)
    if reason is None:
        try:
            return wandb.init(**what, settings=settings)
        except Exception as error:
            reason = _first_line(error)
    warn("wandb-offline", f"wandb: {reason}; {LATER} {folder}/wandb/offline-run-*")
    return wandb.init(**what, mode="offline", settings=settings)
