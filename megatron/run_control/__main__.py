"""What the shell scripts call: `python -m megatron.run_control prepare|begin|end|settings|line ...`.

    prepare RECIPE [--run-dir DIR] [--processes N] [--without FLAG ...] [--flag value ...]    prints the run folder
    begin RUN        prints the attempt's number; status 3 when the guard stops the run
    end RUN STATUS   prints what is decided; status 10: start it again, else the final status
    settings RUN     prints the recipe's environment as shell exports
    line FILE N      prints the words of the Nth launch of a sweep, one a line

Variables: SCRIPT_WANTED (prepare refuses a recipe for another script), JOB_RECORD and SUBMIT_LINE (what SLURM says of
the job, for rerun.sh: resubmission.py), RESET_GUARD, CANCELLED, and the limits of limits.py.

What always holds: prepare prints the run folder and nothing else on its standard output; bad input is one line on
standard error and status 2.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.run_control.attempts import begin_attempt, end_attempt
from megatron.run_control.environment import check_argument, shell_exports
from megatron.run_control.errors import GuardError, LaunchError, said
from megatron.run_control.known_flags import check_flags, known_flags
from megatron.run_control.limits import check_limits, restart_limit, whole_number
from megatron.run_control.recipes import FlagValue, Recipe, check_script, load_recipe, parse_overrides
from megatron.run_control.resubmission import resubmission
from megatron.run_control.run_folder import RunFolder
from megatron.run_control.snapshot import take_snapshot

REPOSITORY = Path(__file__).resolve().parents[2]
STOPPED_BY_GUARD = 3
START_AGAIN = 10
# Flags of the launcher; tests/test_recipes.py checks that no flag of the training scripts has such a name.
LAUNCHER_FLAGS = ("run-dir", "processes", "without")


@dataclass(frozen=True)
class LaunchLine:
    """A launch as written on the command line: the recipe, the launcher's own flags, and flags of the script."""

    recipe: Path
    run_dir: Path | None
    processes: str | None
    without: tuple[str, ...]
    flags: Mapping[str, FlagValue]


def parse_launch_line(arguments: Sequence[str]) -> LaunchLine:
    """Read RECIPE [launcher flags] [flags of the script]."""
    if not arguments or not arguments[0].strip() or arguments[0].startswith("--"):
        found = f"{arguments[0]!r} was found" if arguments else "nothing was found"
        raise LaunchError(f"name a recipe first, for example scripts/recipes/tiny-gpt.yaml; {found}")
    flags = parse_overrides(arguments[1:], gathered=("without",))
    run_dir, processes, without = (flags.pop(name, None) for name in LAUNCHER_FLAGS)
    for name, value in (("run-dir", run_dir), ("processes", processes)):
        if isinstance(value, bool | list) or (value is not None and not str(value).strip()):
            given = "none was" if value is True else f"{value!r} was"
            raise LaunchError(f"--{name} needs one value; {given} given")
    if without is True:
        raise LaunchError("--without needs the names of flags")
    return LaunchLine(
        recipe=Path(arguments[0]),
        run_dir=None if run_dir is None else Path(str(run_dir)),
        processes=None if processes is None else str(processes),
        without=() if without is None else tuple(map(str, without if isinstance(without, list) else [without])),
        flags=flags,
    )


def resolve(line: LaunchLine) -> Recipe:
    """The recipe with the command line's flags, every flag known to the training scripts, its script one of them."""
    recipe = load_recipe(line.recipe).overridden(line.flags, line.without)
    check_script(recipe, line.recipe, REPOSITORY)
    if line.processes is not None:
        processes = whole_number(line.processes)
        if not processes:
            raise LaunchError(f"--processes is {line.processes!r}, a whole number from 1 is wanted")
        recipe = replace(recipe, processes=processes)
    check_flags(recipe.flags, known_flags())
    return recipe


def prepare(arguments: Sequence[str]) -> int:
    """Resolve the recipe, make the run folder and print its path; a requeued job finds its own again."""
    line = parse_launch_line(arguments)
    check_limits()
    file, run_dir = line.recipe, line.run_dir
    if run_dir is None:
        name = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
        run_dir = REPOSITORY / "runs" / f"{file.stem}-{name}"
    run = RunFolder(Path(os.path.realpath(run_dir)))
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and run.launch.exists():
        print(run.path)  # whatever became of the recipe meanwhile, the run goes on as it was launched
        return 0
    recipe = resolve(line)
    wanted = os.environ.get("SCRIPT_WANTED")
    if wanted and recipe.script != wanted:
        raise LaunchError(f"{file} is a recipe for {recipe.script}, this launches {wanted}: submit the other .sbatch")
    if run.create(recipe, REPOSITORY):
        command, record = ["scripts/launch.sh"], os.environ.get("JOB_RECORD")
        submitted = os.environ.get("SUBMIT_LINE", "").strip()
        if record:
            batch = REPOSITORY / "scripts" / "slurm" / f"{Path(recipe.script).stem}.sbatch"
            name = batch.name if batch.is_file() else "pretrain_gpt.sbatch"
            command = [*resubmission(record, submitted), f"scripts/slurm/{name}"]
        take_snapshot(run, REPOSITORY, submitted or shlex.join([*command, *arguments]), command)
    print(run.path)
    return 0


def settings(run: RunFolder) -> int:
    """Print the recipe's environment for a shell to evaluate."""
    print(shell_exports(run.settings()["environment"]), end="")
    return 0


def sweep_line(file: Path, number: int) -> list[str]:
    """The words of the Nth line (from 1) that is neither blank nor a comment. Raises LaunchError without one."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LaunchError(f"{file} is no UTF-8 text: {error}") from None
    lines = [line for line in text.split("\n") if line.strip() and line.strip()[0] != "#"]
    if not 1 <= number <= len(lines):
        raise LaunchError(f"{file} has {len(lines)} launches, number {number} is wanted: submit --array=1-{len(lines)}")
    try:
        words = shlex.split(lines[number - 1])
    except ValueError as error:
        raise LaunchError(f"{file}, launch {number}: {error}") from None
    for word in words:
        check_argument(word, f"{file}, launch {number}: a word")
    return words


def end(run: RunFolder, status: int, limit: int) -> int:
    """Record the attempt's end; returns START_AGAIN or the final status."""
    decision = end_attempt(run, status, limit, cancelled=os.environ.get("CANCELLED") == "1")
    print(decision.reason)
    return START_AGAIN if decision.again else decision.status


def main(argv: Sequence[str]) -> int:
    """Run one command."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    command, arguments = (argv[0], argv[1:]) if argv else ("", argv)
    try:
        if command == "prepare":
            return prepare(arguments)
        if command == "begin" and len(arguments) == 1:
            reset = os.environ.get("RESET_GUARD") == "1"
            try:
                print(begin_attempt(RunFolder(Path(arguments[0])), restart_limit(), reset))
            except GuardError as error:
                print(error, file=sys.stderr)
                return STOPPED_BY_GUARD
            return 0
        if command == "end" and len(arguments) == 2 and arguments[1].isdecimal():
            return end(RunFolder(Path(arguments[0])), int(arguments[1]), restart_limit())
        if command == "settings" and len(arguments) == 1:
            return settings(RunFolder(Path(arguments[0])))
        if command == "line" and len(arguments) == 2 and (number := whole_number(arguments[1])) is not None:
            print(*sweep_line(Path(arguments[0]), number), sep="\n")
            return 0
    except (LaunchError, OSError) as error:
        print(f"error: {said(error)}", file=sys.stderr)
        return 2
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
