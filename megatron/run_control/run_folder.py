"""Where a run keeps what, and how its files are written.

    run = RunFolder(Path("runs/tiny-gpt-17"))
    run.create(recipe, arguments)     # once; a second start of the same run finds the same content
    run.step()                        # the last completely saved step, 0 when there is none

    recipe.yaml      the resolved recipe, flags of the command line included
    flags.txt        the arguments of the script, one a line
    launch.json      script, processes per node, environment, repository, time
    launch.lock      locked while a launch of the run lives (scripts/slurm/lib.sh); says whose it is
    snapshot/        commit, uncommitted diff, packages, variables, submit line (snapshot.py)
    rerun.sh         the same run again
    attempts.json    every start and how it ended (attempts.py)
    outcomes/        how every node's processes of an attempt ended
    log.txt          everything that the trainers printed, all attempts
    heartbeats/      one file a rank, touched while it trains
    stacks/          where every rank stood when the watchdog stopped it
    checkpoints/, tensorboard/, wandb/

What always holds: a file is written beside and renamed into place; flags, script, processes and variables of a run
never change: a launch that wants others is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron.run_control.environment import check_argument, check_text
from megatron.run_control.errors import LaunchError, why_no_folder
from megatron.run_control.limits import whole_number
from megatron.run_control.recipes import FlagValue, Recipe, flag_arguments

TRACKER = "latest_checkpointed_iteration.txt"
_SETTINGS = {"script": str, "processes": int, "environment": dict, "repository": str, "folder": str}  # of launch.json
_OWN_PLACE = "every run writes to a place of its own"
# Flags that several runs cannot have in common, and why.
OWNED_FLAGS = {
    "save": "every run saves into its own folder; with one for all, seeds would go on from each other's checkpoint",
    "load": "every run goes on from its own checkpoint; weights to begin with are pretrained-checkpoint",
    "tensorboard-dir": "every run logs into its own folder",
    "wandb-run-id": "every run is a wandb run of its own",
    "wandb-exp-name": "every run is named after its folder",
    "wandb-save-dir": "every run keeps wandb's files in its own folder",
    "exit-signal": "the launcher asks runs to save by SIGUSR2",
    **dict.fromkeys(
        (
            *("non-persistent-global-ckpt-dir", "non-persistent-local-ckpt-dir", "ckpt-convert-save"),
            *("config-logger-dir", "memory-snapshot-path", "flight-recorder-dump-path", "moe-routing-trace-path"),
            *("logits-save-dir", "rl-profile-dir", "result-rejected-tracker-filename"),
        ),
        _OWN_PLACE,
    ),
}

# How the launcher asks a run to save.
_ASKED: dict[str, FlagValue] = {"exit-signal-handler": True, "exit-signal": "SIGUSR2"}

# Flags that say where a run begins; once it has a checkpoint of its own, that does.
FIRST_START_FLAGS = ("--finetune", "--ckpt-step", "--no-load-optim", "--no-load-rng")


def write_whole(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.chmod(mode)
        os.replace(partial, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; it could not be written", str(file)) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_json(file: Path, default: Any) -> Any:
    """The content of a JSON file; `default` where there is none. Raises LaunchError for one that is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except OSError as error:
        raise LaunchError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(f"{file} is damaged, it is no JSON ({error})") from None
    except RecursionError:
        raise LaunchError(f"{file} is damaged, its brackets are nested too deep") from None


class RunFolder:
    """A folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.flags = path / "flags.txt"
        self.launch = path / "launch.json"
        self.lock = path / "launch.lock"
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
        check_text(str(self.path), "the run folder's name")
        arguments = script_arguments(recipe, self.path)
        for argument in arguments:
            check_argument(argument, "a flag's value")
        with self._creating():
            if self.launch.exists():
                self._check_same(recipe)
                return False
            begun = {self.recipe: recipe.as_yaml(), self.flags: "".join(f"{argument}\n" for argument in arguments)}
            self._check_free(begun)
            for file, text in begun.items():
                write_whole(file, text)
            settings = {
                **_settings_of(recipe),
                "repository": str(repository),
                "folder": str(self.path.resolve()),
                "created": time.time(),
            }
            write_whole(self.launch, json.dumps(settings, indent=2) + "\n")
        return True

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """One at a time: of two first launches the second finds the first one's run."""
        with _opened_in(self.path, ".creating.lock") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: as good as it gets
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check_same(self, recipe: Recipe) -> None:
        difference = self.difference(recipe)
        if difference is None:
            return
        if (was := self._moved_from()) is not None:
            raise LaunchError(
                f"{self.path} was moved or copied from {was}, which its flags still name. Put it back there, or start "
                "afresh in another --run-dir"
            )
        there, wanted = difference
        raise LaunchError(
            f"{self.path} holds a run that was launched with {there}; {wanted} is wanted now. Continue it as it is "
            f"with {shlex.quote(str(self.rerun))}, or choose another --run-dir"
        )

    def _moved_from(self) -> Path | None:
        """The folder that the run was launched in, where that is another one than this."""
        was = self.settings().get("folder")
        if was is None or (Path(was).exists() and self.path.samefile(was)):
            return None
        return Path(was)

    def _check_free(self, begun: Mapping[Path, str]) -> None:
        """Refuse a folder that holds something and is no run: nothing of it is overwritten or taken for the run's.
        `begun`: files with a content that a creation that was killed may have left."""
        ours = {".creating.lock", self.lock.name}
        ours |= {file.name for file, text in begun.items() if file.is_file() and file.read_bytes() == text.encode()}
        partial = tuple(f".{file.name}." for file in (self.recipe, self.flags, self.launch))
        found = sorted(
            entry.name for entry in self.path.iterdir() if entry.name not in ours and not entry.name.startswith(partial)
        )
        if found:
            raise LaunchError(
                f"{self.path} is not empty and is no run folder: it has no {self.launch.name}, but "
                f"{', '.join(found[:4])}{' ...' if len(found) > 4 else ''}. Choose a new or an empty folder for it"
            )

    def difference(self, recipe: Recipe) -> tuple[str, str] | None:
        """What the run has and a recipe has not, and the other way round; None where they are one run. The order of
        flags does not count, nor does a link through which the folder is reached."""
        folder = self.path.resolve()
        if self._moved_from() is None:
            folder = Path(self.settings().get("folder", folder))
        there, wanted = _by_flag(self.arguments()), _by_flag(script_arguments(recipe, folder))
        for name in sorted(there.keys() | wanted.keys()):
            if there.get(name) != wanted.get(name):
                return _shown(name, there), _shown(name, wanted)
        settings, now = self.settings(), _settings_of(recipe)
        for key in ("script", "processes"):
            if settings.get(key) != now[key]:
                return f"{key} {settings.get(key)}", f"{key} {now[key]}"
        old, new = settings.get("environment", {}), now["environment"]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                return _assigned(name, old), _assigned(name, new)
        return None

    def settings(self) -> dict[str, Any]:
        """launch.json. Raises LaunchError where the folder is not a run's, or the file is damaged."""
        settings = read_json(self.launch, None)
        if settings is None:
            raise LaunchError(f"{self.path} is not a run folder: it has no {self.launch.name}")
        if not isinstance(settings, dict) or not {"script", "processes", "environment"} <= settings.keys():
            raise LaunchError(f"{self.launch} is damaged: it has no script, processes and environment")
        for name, kind in _SETTINGS.items():
            if not isinstance(settings.get(name, kind()), kind):
                raise LaunchError(f"{self.launch} is damaged: {name} is {settings[name]!r}")
        if not all(isinstance(value, str) for value in settings["environment"].values()):
            raise LaunchError(f"{self.launch} is damaged: environment is {settings['environment']!r}")
        return settings

    def arguments(self) -> list[str]:
        """The arguments of the script. Raises LaunchError where they cannot be read."""
        try:
            # Not splitlines: a value may hold a carriage return or one of Unicode's line separators.
            return self.flags.read_bytes().decode("utf-8").split("\n")[:-1]
        except FileNotFoundError:
            raise LaunchError(f"{self.path} is damaged: it has no {self.flags.name}") from None
        except OSError as error:
            raise LaunchError(f"{self.flags} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise LaunchError(f"{self.flags} is damaged, it is no UTF-8 ({error})") from None

    def arguments_now(self) -> list[str]:
        """The arguments with which the script starts now. A run with a checkpoint of its own goes on from that: what
        says where a run begins belongs to the starts before it."""
        arguments, save = self.arguments(), self.value_of("save")
        if save is None or not self.step():
            return arguments
        flags = {name: values for name, values in _by_flag(arguments).items() if name not in FIRST_START_FLAGS}
        if "--load" in flags:
            flags["--load"] = [save]
        return [word for name, values in flags.items() for word in (name, *values)]

    def stops_early(self) -> str | None:
        """The flag by which a run that ended well has stopped before its last step; None where it has not, or nothing
        says so."""
        limits = [name for name in ("exit-interval", "exit-duration-in-mins") if self.value_of(name)]
        steps = whole_number(self.value_of("train-iters") or "")
        return f"--{limits[0]}" if limits and steps and self.tracker() and self.step() < steps else None

    def value_of(self, flag: str) -> str | None:
        """The value that follows a flag, None where it is not given."""
        values = _by_flag(self.arguments()).get(f"--{flag}")
        return values[0] if values else None

    def tracker(self) -> Path | None:
        """The file in --save that names the last complete checkpoint; None where nothing is saved."""
        save = self.value_of("save")
        return None if save is None else Path(save) / TRACKER

    def step(self) -> int:
        """The step of the last complete checkpoint in --save; 0 without one."""
        tracker = self.tracker()
        if tracker is None:
            return 0
        try:
            text = tracker.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return 0
        return whole_number(text.strip()) or 0


def _opened_in(folder: Path, name: str) -> IO[str]:
    """A file in a folder that is made where it is absent. Raises LaunchError, and leaves no folder, where it cannot
    be."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("a")
    except OSError as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise LaunchError(
            f"the run folder {folder} cannot be made or written: {why_no_folder(folder, error)}. Choose another "
            "--run-dir: a new folder, or that of the run that is to go on"
        ) from None


def script_arguments(recipe: Recipe, folder: Path) -> list[str]:
    """The recipe's flags and those that every launched run needs: where it saves and logs, and how it is asked to save.
    A value in the recipe always wins, but for how it is asked. Raises LaunchError for that."""
    flags = dict(recipe.flags)
    for name, wanted in _ASKED.items():
        if flags.get(name, wanted) != wanted:
            raise LaunchError(
                f"--{name} {flags[name]}: {OWNED_FLAGS['exit-signal']}, and a run that does not save then loses its "
                "steps when it is preempted; leave the flag out"
            )
    ours = {
        "save": str(folder / "checkpoints"),
        "load": flags.get("save", str(folder / "checkpoints")),
        "tensorboard-dir": str(folder / "tensorboard"),
        **_ASKED,
    }
    if "wandb-project" in flags:
        ours |= {"wandb-exp-name": folder.name, "wandb-save-dir": str(folder)}
    return flag_arguments({name: value for name, value in ours.items() if name not in flags} | flags)


def _settings_of(recipe: Recipe) -> dict[str, Any]:
    return {"script": recipe.script, "processes": recipe.processes, "environment": dict(recipe.environment)}


def _by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """{"--lr": ["1e-3"], ...}"""
    found: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = argument
            found[name] = []
        else:
            found.setdefault(name, []).append(argument)
    return found


def _shown(name: str, flags: Mapping[str, list[str]]) -> str:
    return f"no {name}" if name not in flags else shlex.join([name, *flags[name]])


def _assigned(name: str, variables: Mapping[str, str]) -> str:
    return f"no variable {name}" if name not in variables else f"{name}={shlex.quote(variables[name])}"
