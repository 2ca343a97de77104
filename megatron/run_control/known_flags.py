"""Which flags the training scripts have, so that a misspelt one is found before a job waits for its nodes.

    check_flags({"num-layer": 2}, known_flags())     # LaunchError: ... nearest: num-layers

Building upstream's parser imports torch and takes seconds, so the table is kept in a cache file
($XDG_CACHE_HOME or ~/.cache, folder megatron-wide-residual). Its name holds a hash of megatron-core's version and file
list, and of every source file here that a flag, its choices or its default can come from: another version or an edited
file builds it afresh.

What always holds: importing this module is light; the table comes from the very parser that the scripts use.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

from megatron.run_control.environment import check_argument
from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import FlagValue

_OVERLAY = Path(__file__).resolve().parents[1]
_WITHOUT_FLAGS = ("ablations", "run_control")  # what reads flags
_ROOT = Path(__file__).resolve().parents[2]

# What stands behind a flag: "bare" nothing, "value" one value, "optional" one or none, "values" one or more, "any" any
# number, "3" so many. {"num-layers": "value", "swiglu": "bare", "data-path": "any"}
type FlagTable = Mapping[str, str]

_PRINT_TABLE = """
import argparse, json, sys
from megatron.training.arguments import add_megatron_arguments
from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS

parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for extension in ARGUMENT_EXTENSIONS:
    parser = extension.add(parser)
table = {}
for action in parser._actions:
    if isinstance(action, argparse._HelpAction):
        continue  # --help is the launcher's own
    kind = {None: "value", 0: "bare", "?": "optional", "+": "values", "*": "any"}.get(action.nargs, str(action.nargs))
    table.update({name[2:]: kind for name in action.option_strings if name.startswith("--")})
json.dump(table, open(sys.argv[1], "w"))
"""


def flag_sources() -> list[Path]:
    """The files of the overlay that flags can come from, and this one."""
    parts = [path for path in _OVERLAY.iterdir() if path.name not in _WITHOUT_FLAGS]
    return sorted([*(file for part in parts for file in part.rglob("*.py")), Path(__file__)])


def _cache_file() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-wide-residual"
    core = distribution("megatron-core")
    key = hashlib.sha256(f"{core.version} {core.read_text('RECORD')} {sys.version}".encode())
    for source in flag_sources():
        key.update(f"{source.relative_to(_OVERLAY)}\n".encode())
        key.update(source.read_bytes())
    return folder / f"flags-{key.hexdigest()[:16]}.json"


def known_flags() -> FlagTable:
    """The table, from the cache or built (some seconds). Raises LaunchError where the parser cannot be built."""
    file = _cache_file()
    try:
        return _read_table(file)
    except (OSError, ValueError, RecursionError):
        pass  # absent, or damaged: built afresh
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        partial.touch()
    except OSError:  # a home directory that cannot be written: the table serves this launch alone
        file = Path(tempfile.mkdtemp()) / file.name
        partial = file.with_name(f".{file.name}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRINT_TABLE, str(partial)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise LaunchError(
            f"the training script's flags cannot be listed: {(done.stderr.strip() or '-').splitlines()[-1]}"
        )
    os.replace(partial, file)
    return _read_table(file)


def _read_table(file: Path) -> FlagTable:
    table = json.loads(file.read_text())
    if not isinstance(table, dict):
        raise ValueError(f"{file} holds no table")
    return table


def check_flags(flags: Mapping[str, FlagValue], table: FlagTable) -> None:
    """Raise LaunchError for a flag that does not exist, naming the nearest, or one with a value that it cannot have."""
    for name, value in flags.items():
        kind = table.get(name)
        if kind is None:
            nearest = difflib.get_close_matches(name.replace("_", "-"), table, n=3, cutoff=0.6)
            hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
            raise LaunchError(f"--{name}: the training scripts have no such flag{hint}")
        if kind == "bare" and not isinstance(value, bool):
            raise LaunchError(f"--{name} takes no value, {value!r} was given: write {name}: true")
        if value is True and kind not in ("bare", "optional", "any"):
            raise LaunchError(f"--{name} needs {'a value' if kind == 'value' else 'values'}")
        if isinstance(value, list) and kind in ("value", "optional"):
            raise LaunchError(f"--{name} takes one value, the list {value!r} was given")
        if kind.isdecimal() and (len(value) if isinstance(value, list) else 1) != int(kind):
            raise LaunchError(f"--{name} takes {kind} values, {value!r} was given")
        for item in value if isinstance(value, list) else [value]:
            check_argument(str(item), f"--{name}: its value")
