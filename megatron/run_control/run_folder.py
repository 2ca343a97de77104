"""Where a run keeps what, and how its files are written.

    run = RunFolder(Path("runs/tiny-gpt-17"))
    run.create(recipe, arguments)     # once; a second start of the same run finds the same content
    run.step()                        # the last completely saved step, 0 when there is none

    recipe.yaml      the resolved recipe, flags of the command line included
    flags.txt        the arguments of the script, one a line
    launch.json      script, processes per node, environment, repository, time
    snapshot/        commit, uncommitted diff, packages, variables, submit line (snapshot.py)
    rerun.sh         the same run again
    attempts.json    every start and how it ended (attempts.py)
    outcomes/        how every node's processes of an attempt ended
    log.txt          everything that the trainers printed, all attempts
    heartbeats/      one file a rank, touched while it trains
    stacks/          where every rank stood when the watchdog stopped it
    checkpoints/, tensorboard/, wandb/

What always holds: a file is written beside and renamed into place; the flags of a run never change.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import Recipe, flag_arguments

TRACKER = "latest_checkpointed_iteration.txt"


def write_whole(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.chmod(mode)
    os.replace(partial, file)


def read_json(file: Path, default: Any) -> Any:
    """The content of a JSON file; `default` where there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


class RunFolder:
    """A folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.flags = path / "flags.txt"
        self.launch = path / "launch.json"
        self.snapshot = path / "snapshot"
        self.rerun = path / "rerun.sh"
        self.attempts = path / "attempts.json"
        self.outcomes = path / "outcomes"
        self.log = path / "log.txt"
        self.heartbeats = path / "heartbeats"
        self.stacks = path / "stacks"

    def create(self, recipe: Recipe, repository: Path) -> bool:
        """Write recipe, flags and launch settings. Returns False when the same run is there already; raises LaunchError
        when the folder holds another one."""
        arguments = script_arguments(recipe, self.path)
        for argument in arguments:
            if "\n" in argument:
                raise LaunchError(f"a flag's value holds a line break: {argument!r}")
        if self.launch.exists():
            there = self.arguments()
            if there != arguments or self.settings()["script"] != recipe.script:
                raise LaunchError(
                    f"{self.path} holds a run with other flags ({_first_difference(there, arguments)}). Continue it "
                    f"with {self.rerun}, or choose another --run-dir"
                )
            return False
        write_whole(self.recipe, recipe.as_yaml())
        write_whole(self.flags, "".join(f"{argument}\n" for argument in arguments))
        settings = {
            "script": recipe.script,
            "processes": recipe.processes,
            "environment": dict(recipe.environment),
            "repository": str(repository),
            "created": time.time(),
        }
        write_whole(self.launch, json.dumps(settings, indent=2) + "\n")
        return True

    def settings(self) -> dict[str, Any]:
        """launch.json. Raises LaunchError where the folder is not a run's."""
        settings = read_json(self.launch, None)
        if settings is None:
            raise LaunchError(f"{self.path} is not a run folder: it has no {self.launch.name}")
        return settings

    def arguments(self) -> list[str]:
        """The arguments of the script."""
        return self.flags.read_text(encoding="utf-8").splitlines()

    def value_of(self, flag: str) -> str | None:
        """The value that follows a flag, None where it is not given."""
        arguments = self.arguments()
        at = [number for number, argument in enumerate(arguments) if argument == f"--{flag}"]
        return arguments[at[-1] + 1] if at else None

    def step(self) -> int:
        """The step of the last complete checkpoint in --save; 0 without one."""
        save = self.value_of("save")
        if save is None:
            return 0
        try:
            text = (Path(save) / TRACKER).read_text().strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdecimal() else 0


def script_arguments(recipe: Recipe, folder: Path) -> list[str]:
    """The recipe's flags and those that every launched run needs: where it saves and logs, and how it is asked to save.
    A flag of the recipe always wins."""
    flags = dict(recipe.flags)
    ours = {
        "save": str(folder / "checkpoints"),
        "load": flags.get("save", str(folder / "checkpoints")),
        "tensorboard-dir": str(folder / "tensorboard"),
        "exit-signal-handler": True,
        "exit-signal": "SIGUSR2",
    }
    if "wandb-project" in flags:
        ours |= {"wandb-exp-name": folder.name, "wandb-save-dir": str(folder)}
    return flag_arguments({name: value for name, value in ours.items() if name not in flags} | flags)


def _first_difference(there: Sequence[str], wanted: Sequence[str]) -> str:
    for old, new in zip(there, wanted, strict=False):
        if old != new:
            return f"{shlex.quote(old)} there, {shlex.quote(new)} wanted"
    return f"{len(there)} arguments there, {len(wanted)} wanted"
