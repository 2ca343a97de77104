"""What a rerun needs to know about the moment of the launch.

    take_snapshot(RunFolder(path), repository, submit_line, command)

writes snapshot/commit.txt (commit, branch, changed and untracked files), uncommitted.diff (`git apply` brings it back),
packages.txt (what `pip freeze` would say), environment.txt, submit.txt.

What always holds: no variable whose name or content looks like a secret is written; a checkout without git is said so,
not an error.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from megatron.run_control.run_folder import RunFolder, write_whole

_KEPT = re.compile(
    r"^(SLURM|SBATCH|NCCL|GLOO|UCX|CUDA|NVIDIA|OMP|MKL|TORCH|PYTORCH|TRITON|MEGATRON|WANDB|PYTHON|HF|TOKENIZERS|"
    r"CONTAINER_(IMAGE|RUNTIME|MOUNTS|OPTIONS|PYTHON)|APPTAINER|ENROOT|LD_LIBRARY|VIRTUAL_ENV|PATH$|HOSTNAME$|"
    r"WATCHDOG_SECONDS$|CACHE_DIR$|SRUN_OPTIONS$|NETWORK_INTERFACE$|MASTER_PORT$|DATA$|TOKENIZER$)"
)
_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASS|PW\b|_PW|JWT|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# user:password@host
_SECRET_VALUE = re.compile(r"://[^/\s]*@")


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide how a run behaves, secrets left out."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _KEPT.match(name) and not _SECRET.search(name) and not _SECRET_VALUE.search(value)
    }


def _git(repository: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False, errors="replace"
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def take_snapshot(run: RunFolder, repository: Path, submit_line: str, command: Sequence[str]) -> None:
    """Write the snapshot and rerun.sh. `submit_line` is what the user typed, `command` what runs it again in a folder
    that stands behind it."""
    commit = _git(repository, "rev-parse", "HEAD")
    if commit is None:
        write_whole(run.snapshot / "commit.txt", f"{repository} is not a git checkout, or git is not installed\n")
    else:
        status = _git(repository, "status", "--short", "--branch") or ""
        write_whole(run.snapshot / "commit.txt", f"{commit}{status}")
        write_whole(run.snapshot / "uncommitted.diff", _git(repository, "diff", "--binary", "HEAD") or "")
    packages = sorted({f"{found.metadata['Name']}=={found.version}" for found in distributions()}, key=str.lower)
    write_whole(run.snapshot / "packages.txt", "\n".join([f"# {sys.version}", *packages, ""]))
    variables = "".join(f"{name}={shlex.quote(value)}\n" for name, value in kept_variables(os.environ).items())
    write_whole(run.snapshot / "environment.txt", variables)
    write_whole(run.snapshot / "submit.txt", f"cd {shlex.quote(os.getcwd())}\n{submit_line}\n")
    write_whole(run.rerun, _rerun_script(run, repository, command), mode=0o755)


def _rerun_script(run: RunFolder, repository: Path, command: Sequence[str]) -> str:
    folder = shlex.quote(str(run.path))
    return f"""#!/usr/bin/env bash
# The same run again: without an argument it goes on from its last checkpoint, with a folder it starts afresh there.
set -euo pipefail
run={folder}
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd -P)
if ! [ "$here" -ef "$run" ]; then
    printf 'error: %s holds the rerun.sh of %s: it was moved or copied, and its flags name the old place. %s\\n' \\
        "$here" "$run" 'Put it back there, or start afresh in a new --run-dir' >&2
    exit 2
fi
cd {shlex.quote(str(repository))}
was=$(head -n 1 "$run/snapshot/commit.txt")
now=$(git rev-parse HEAD 2>/dev/null || true)
[ "$was" = "$now" ] || printf 'note: the run was launched from commit %s, this is %s\\n' "$was" "$now" >&2
exec {shlex.join(command)} "$run/recipe.yaml" --run-dir "${{1-$run}}"
"""
