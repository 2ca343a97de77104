"""YAML recipes and how they become flags of the training script.

    recipe = load_recipe(Path("scripts/recipes/tiny-gpt.yaml"))
    recipe = recipe.overridden(parse_overrides(["--lr", "1e-4", "--data-path", "0.3", "a", "0.7", "b"]))
    flag_arguments(recipe.flags)     # ["--num-layers", "2", ..., "--lr", "1e-4"]

A recipe is a mapping with these keys, all but `script` optional (and `script` may come from the base):

    base: other.yaml            read first; what stands here wins, key by key in `flags` and `environment`
    script: pretrain_gpt.py     the training script: a .py file of the repository, or anywhere by an absolute path
    processes: 8                processes per node (default 1)
    environment: {NAME: value}  variables of the training processes
    flags:                      keys are the script's flags without the leading --
      num-layers: 24            a value              --num-layers 24
      swiglu: true              a bare flag          --swiglu
      bf16: false               nothing (and takes a flag of the base away)
      data-path: [0.3, a, b]    several values       --data-path 0.3 a b
    resolved: true              values are taken as they stand (recipe.yaml of a run folder has this)

`${NAME}` and `${NAME:-default}` in values are environment variables, except in a resolved recipe. A flag of the command
line takes the place of the recipe's flag of that name and comes last.

What always holds: a key that is not in this table or stands there twice, a variable that is not set and a base that
leads back to itself are errors; two readings of one recipe give the same arguments in the same order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from megatron.run_control.environment import check_environment, check_text
from megatron.run_control.errors import LaunchError
from megatron.run_control.strict_yaml import read_mapping

type Scalar = str | int | float
type FlagValue = bool | Scalar | list[Scalar]

_KEYS = ("base", "script", "processes", "environment", "flags", "resolved")
# Folders of the repository whose Python files are no training scripts.
_WITHOUT_TRAINERS = ("megatron", "scripts", "tests", "tools")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Recipe:
    """What is run: a script, how often on every node, with which variables and flags."""

    script: str
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, FlagValue] = field(default_factory=dict)

    def overridden(self, flags: Mapping[str, FlagValue], without: Sequence[str] = ()) -> Recipe:
        """Return the recipe with these flags in place of its own, last, and without some. Raises LaunchError for an
        absent one in `without`."""
        for name in without:
            if name not in self.flags:
                raise LaunchError(f"--without {name}: the recipe has no such flag")
        kept = {name: value for name, value in self.flags.items() if name not in flags and name not in without}
        return replace(self, flags=kept | dict(flags))

    def as_yaml(self) -> str:
        """The recipe as a file that `load_recipe` reads back to an equal one."""
        content = {
            "resolved": True,  # a ${NAME} in here is what the launch was to hand on
            "script": self.script,
            "processes": self.processes,
            "environment": dict(self.environment),
            "flags": dict(self.flags),
        }
        return yaml.safe_dump(content, sort_keys=False, width=1000)


def load_recipe(file: Path, variables: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe and its bases. `variables` stands for the environment in `${NAME}`."""
    merged = _merged(file, ())
    script = merged["script"]
    if script is None:
        raise LaunchError(f"{file}: no script. Write script: pretrain_gpt.py (or pretrain_mamba.py)")
    if not isinstance(script, str):
        raise LaunchError(f"{file}: script is {script!r}, the name of one training script is wanted")
    processes = merged["processes"]
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise LaunchError(f"{file}: processes is {processes!r}, a whole number from 1 is wanted")
    environment = {name: expanded(value, f"{file}: {name}", variables) for name, value in merged["environment"].items()}
    flags = {name: flag_value(value, f"{file}: {name}", variables) for name, value in merged["flags"].items()}
    return Recipe(
        script=script,
        processes=processes,
        environment=check_environment(environment, f"{file}: environment"),
        flags={name: value for name, value in flags.items() if value is not False},
    )


def check_script(recipe: Recipe, file: Path, repository: Path) -> None:
    """Raise LaunchError, which names the recipe's file, for a script that cannot be a training script."""
    script = Path(recipe.script)
    where, wanted = f"{file}: script is {recipe.script!r}", "pretrain_gpt.py, pretrain_mamba.py or a .py file of yours"
    if ".." in script.parts:
        raise LaunchError(f"{where}, which leads out of {repository}: write {wanted}, by its absolute path")
    if script.suffix != ".py":
        raise LaunchError(f"{where}, which is no Python file: {wanted} is wanted")
    if not (repository / script).is_file():
        there = "there is no such file" if script.is_absolute() else f"which is not in {repository}"
        raise LaunchError(f"{where}, {there}: {wanted} is wanted")
    inside = (repository / script).resolve()
    if any(inside.is_relative_to((repository / folder).resolve()) for folder in _WITHOUT_TRAINERS):
        folders = ", ".join(f"{folder}/" for folder in _WITHOUT_TRAINERS)
        raise LaunchError(f"{where}, but no file in {folders} trains: {wanted} is wanted")


@dataclass(frozen=True)
class _Literal:
    """A value of a resolved recipe."""

    value: object


def _merged(file: Path, above: tuple[Path, ...]) -> dict:
    """The recipe's mapping laid over its base's."""
    here = Path(os.path.realpath(file))  # resolve() raises for a link that leads to itself
    if here in above:
        cycle = [*above[above.index(here) :], here]
        raise LaunchError(f"{file}: its bases lead back to itself: {' -> '.join(map(str, cycle))}")
    there = ", ".join(sorted(path.name for path in file.parent.glob("*.yaml"))) or "no recipe"
    content = read_mapping(file, _KEYS, f"no such recipe; {file.parent} has {there}")
    resolved = content.get("resolved", False)
    if not isinstance(resolved, bool):
        raise LaunchError(f"{file}: resolved is {resolved!r}, true or false is wanted")
    result: dict = {"script": None, "processes": 1, "environment": {}, "flags": {}}
    if content.get("base") is not None:
        check_base(file, content["base"])
        result = _merged(file.parent / content["base"], (*above, here))
    for key in ("script", "processes"):
        result[key] = content.get(key, result[key])
    for key in ("environment", "flags"):
        table = {} if content.get(key) is None else content[key]
        if not isinstance(table, dict):
            raise LaunchError(f"{file}: {key} is a {type(table).__name__}, a mapping is wanted")
        own = {str(name): _Literal(value) if resolved else value for name, value in table.items()}
        result[key] = result[key] | own
    return result


def check_base(file: Path, base: object) -> None:
    """Raise LaunchError for a `base` that names no file."""
    if not isinstance(base, str) or not base.strip():
        raise LaunchError(f"{file}: base is {base!r}, the name of one recipe's file is wanted, relative to this one")
    check_text(base, f"{file}: base")


def expanded(value: object, where: str, variables: Mapping[str, str] | None = None) -> object:
    """The value with its `${NAME}` replaced, where it is text; `variables` in place of the environment."""
    if isinstance(value, _Literal):
        return value.value
    if not isinstance(value, str):
        return value
    known = os.environ if variables is None else variables

    def found(match: re.Match[str]) -> str:
        name, default = match.groups()
        if known.get(name):
            return known[name]
        if default is None:
            raise LaunchError(f"{where} needs the environment variable {name}, which is not set")
        return default

    return _VARIABLE.sub(found, value)


def flag_value(value: object, where: str, variables: Mapping[str, str] | None = None) -> FlagValue:
    """A value of `flags`, checked and expanded."""
    literal = isinstance(value, _Literal)
    value = value.value if isinstance(value, _Literal) else value
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(item, str | int | float) for item in values):
        raise LaunchError(f"{where} is {value!r}: a value, a list of values, true or false is wanted")
    if isinstance(value, list) and any(isinstance(item, bool) for item in values):
        raise LaunchError(f"{where} is {value!r}: true and false mean nothing in a list")
    if literal:
        return value  # type: ignore[return-value]
    done = [expanded(item, where, variables) for item in values]
    return done if isinstance(value, list) else done[0]  # type: ignore[return-value]


def parse_overrides(arguments: Sequence[str], gathered: Sequence[str] = ()) -> dict[str, FlagValue]:
    """Read `--name`, `--name value ...` and `--name=value` of a command line into flags; a name twice: the last, as the
    training scripts have it, but for the names in `gathered`, whose values add up."""
    flags: dict[str, FlagValue] = {}
    at = 0
    while at < len(arguments):
        if not arguments[at].startswith("--") or len(arguments[at]) < 3:
            raise LaunchError(f"{arguments[at]!r} belongs to no flag: write the recipe first, then --flag value ...")
        name, equals, value = arguments[at][2:].partition("=")
        at += 1
        values: list[Scalar] = [value] if equals else []
        while not equals and at < len(arguments) and not arguments[at].startswith("--"):
            values.append(arguments[at])
            at += 1
        before = flags.pop(name, None)
        if name in gathered and before is not None:
            earlier = before if isinstance(before, list) else [before]
            values = [] if before is True or not values else [*earlier, *values]  # none: an error of the caller's
        flags[name] = True if not values else values[0] if len(values) == 1 else values
    return flags


def flag_arguments(flags: Mapping[str, FlagValue]) -> list[str]:
    """The flags as arguments of the script, in their order."""
    arguments: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments += [str(item) for item in (value if isinstance(value, list) else [value])]
    return arguments
