#!/usr/bin/env python3
"""Shows the flags that a YAML recipe becomes, as one command line or one flag a line.

    python tools/recipe_flags.py scripts/recipes/tiny-gpt.yaml --lr 1e-4 --without bf16
    python tools/recipe_flags.py scripts/recipes/gpt-8b.yaml --lines | diff - <(... gpt-1b.yaml --lines)

Everything after the recipe is what scripts/launch.sh takes: flags of the training script, which take the place of the
recipe's, `--processes N`, `--without FLAG ...`. --lines prints one flag a line, --yaml the resolved recipe.
megatron/run_control/recipes.py describes the recipes.

What always holds: what is printed is what a launch passes on, but for the folders that the launch adds. Exit status: 0,
or 2 with one line for a recipe or a flag that cannot be used.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_pipe import run_tool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    from megatron.run_control.__main__ import parse_launch_line, resolve
    from megatron.run_control.errors import LaunchError, said
    from megatron.run_control.recipes import flag_arguments

    lines, as_yaml = ("--lines" in arguments, "--yaml" in arguments)
    try:
        recipe = resolve(parse_launch_line([a for a in arguments if a not in ("--lines", "--yaml")]))
    except (LaunchError, OSError) as error:
        print(f"error: {said(error)}", file=sys.stderr)
        return 2
    if as_yaml:
        print(recipe.as_yaml(), end="")
    elif lines:
        for name, value in recipe.flags.items():
            print(shlex.join(flag_arguments({name: value})))
    else:
        print(shlex.join([recipe.script, *flag_arguments(recipe.flags)]))
    return 0


if __name__ == "__main__":
    run_tool(main)
