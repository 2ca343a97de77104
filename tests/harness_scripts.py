"""Runs the shell scripts of the repository as a user would, in a process group of their own.

    done = run_script("./scripts/setup.sh")
    commands = readme_commands()          # every command that README.md shows, continued lines joined

What always holds: a script sees none of pytest's own variables, and no standard input.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

needs_own_venv = pytest.mark.skipif(
    Path(sys.prefix) != REPOSITORY / ".venv",
    reason="the scripts use .venv, which these tests were not started from: run ./scripts/test.sh",
)


def script_environment(**variables: str) -> dict[str, str]:
    """This environment without pytest's and Python's own variables, and with those given."""
    own = ("PYTEST", "PYTHON", "VIRTUAL_ENV", "TRAIN_ITERS", "STREAMS", "RUN_DIR")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | variables


def start_script(*command: str, cwd: Path = REPOSITORY, **variables: str) -> subprocess.Popen:
    """Start a script as the leader of a process group, as a terminal would, so that ^C can be sent to the group."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=script_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_script(*command: str, cwd: Path = REPOSITORY, timeout: float = 900, **variables: str):
    """Run a script to its end; returns a CompletedProcess with its output as text."""
    process = start_script(*command, cwd=cwd, **variables)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def readme_commands(file: Path = REPOSITORY / "README.md") -> list[str]:
    """Every command in the ```bash blocks of a Markdown file; lines that end in a backslash are joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", file.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.partition(" #")[0].split()) for line in lines if line.strip() and not line.startswith("#")]
