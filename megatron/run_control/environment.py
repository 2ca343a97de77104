"""The variables that a recipe may set for its training processes.

    check_environment({"NCCL_DEBUG": "INFO"}, "recipe.yaml: environment")
    shell_exports({"A": "it's $HOME"})         # export A='it'"'"'s $HOME'

A recipe's environment is evaluated by the shell of every node right before torchrun (scripts/slurm/node.sh).

What always holds: a name is a shell's; one that the launcher or torchrun sets, or has read long before, is refused,
because the recipe's value would break the run or mean nothing; a value reaches the processes character by character.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from megatron.run_control.errors import LaunchError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_THE_LAUNCHER = re.compile(
    r"MEGATRON_RUN_\w*|PYTHON|PYTHONPATH|MASTER_(ADDR|PORT)|SLURM\w*|SBATCH\w*|SRUN_OPTIONS|"
    r"CONTAINER_\w+|CACHE_DIR|NETWORK_INTERFACE|REPOSITORY|RESTART|RESET_GUARD|LOCK_SECONDS|MAX_RESTARTS_WITHOUT_PROGRESS"
)
_OF_TORCHRUN = re.compile(r"RANK|(LOCAL|GROUP|ROLE)_RANK|ROLE_NAME|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|TORCHELASTIC_\w+")
_OF_BASH = re.compile(r"UID|EUID|PPID|SHELLOPTS|BASHOPTS|BASH_\w+|BASH|IFS|_")


def check_environment(environment: Mapping[str, object], where: str) -> dict[str, str]:
    """Return the variables as text. Raises LaunchError, which begins with `where`, for one that cannot be set."""
    checked = {}
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise LaunchError(f"{where}: {name!r} is no name of a variable: letters, digits and _ are wanted")
        if _OF_THE_LAUNCHER.fullmatch(name):
            raise LaunchError(f"{where}: {name} belongs to the launcher: set it in front of launch.sh or sbatch")
        for pattern, whose in ((_OF_TORCHRUN, "torchrun"), (_OF_BASH, "bash")):
            if pattern.fullmatch(name):
                raise LaunchError(f"{where}: {name} is set by {whose}: leave it out")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise LaunchError(f"{where}: {name} is {value!r}: a text or a number is wanted, in quotes where in doubt")
        check_text(str(value), f"{where}: {name}")
        checked[name] = str(value)
    return checked


def check_text(text: str, where: str) -> None:
    """Raise LaunchError for what no argument and no variable of a process can hold."""
    try:
        if "\0" not in text.encode("utf-8").decode("utf-8"):
            return
    except UnicodeEncodeError:
        raise LaunchError(f"{where} is {text!r}, which is no UTF-8 text") from None
    raise LaunchError(f"{where} is {text!r}, which holds a zero byte")


def check_argument(text: str, where: str) -> None:
    """Raise LaunchError for a value that does not fit a line of flags.txt."""
    check_text(text, where)
    if "\n" in text:
        raise LaunchError(f"{where} holds a line break: {text!r}")


def shell_exports(environment: Mapping[str, str]) -> str:
    """Lines for a shell to evaluate."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
