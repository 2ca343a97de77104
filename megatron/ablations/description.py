"""An ablation's YAML and the runs that it means.

    ablation = load_ablation(Path("scripts/ablations/quickstart_gpt.yaml"), root)
    [run.name for run in ablation.runs]          # ["ordinary-seed-1", "streams-2-seed-1", ...]

    base: ../recipes/quickstart-gpt.yaml     the recipe, relative to this file
    folder: runs/ablations/quickstart_gpt    where the run folders lie (default: runs/ablations/NAME)
    processes: 1                             in place of the recipe's (optional)
    environment: {OMP_NUM_THREADS: 1}        on top of the recipe's (optional)
    flags: {train-iters: 100}                on top of the recipe's, for every run (optional)
    axes:                                    one mapping, or a list of mappings whose products are joined
      - {streams: 1}
      - {streams: [2, 4, 8], retention: [false, true]}
    seeds: [1, 2, 3]
    reference: {streams: 1}                  whom every variant is compared with (default: streams 1)

A mapping of axes means every combination of its values; axes.py lists the axes. The reference of a variant is the one
variant that has the reference's values and is otherwise the same, but for axes that only wide streams have.

Values may hold `${NAME}` as in a recipe. A flag that a run folder owns (save, load, tensorboard-dir, wandb-run-id, ...)
is refused, also in the base recipe: seeds would share one checkpoint.

What always holds: an unknown key, a key that stands twice, axes that contradict each other and numbers that cannot be
used are a LaunchError that names the file and the key; the same YAML gives the same runs, names and flags in the same
order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.ablations.axes import WIDE_AXES, as_number, check_streams, flags_of, is_whole, label_of
from megatron.run_control.environment import check_environment, check_text
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import FlagTable, check_flags
from megatron.run_control.recipes import FlagValue, Recipe, check_base, check_script, expanded, flag_value, load_recipe
from megatron.run_control.run_folder import OWNED_FLAGS
from megatron.run_control.strict_yaml import read_mapping

_KEYS = ("base", "folder", "processes", "environment", "flags", "axes", "seeds", "reference")
_LONGEST_NAME = 200  # bytes; a file system takes 255, with the seed and what stands around it while it is written
# What the report reads from TensorBoard; a recipe that sets one wins.
_LOGGED = ("log-timers-to-tensorboard", "log-memory-to-tensorboard")


@dataclass(frozen=True)
class Variant:
    """One combination of axis values."""

    name: str
    settings: Mapping[str, object]
    recipe: Recipe  # without a seed
    reference: str | None = None  # the variant that this one is compared with; None for a reference itself


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed, and its run folder."""

    variant: Variant
    seed: int
    recipe: Recipe
    folder: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name


@dataclass(frozen=True)
class Ablation:
    """Everything that a YAML says."""

    name: str
    file: Path
    folder: Path
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]

    def tokens(self, variant: Variant) -> int | None:
        """Tokens that a run of this variant trains on; None where its flags do not say."""
        values = {name: as_number(value) for name, value in variant.recipe.flags.items()}
        length, steps, batch = (values.get(name) for name in ("seq-length", "train-iters", "global-batch-size"))
        samples = values.get("train-samples") or (steps or 0) * (batch or 0)
        tokens = (length or 0) * samples
        return int(tokens) if 0 < tokens < math.inf else None


def load_ablation(file: Path, root: Path, table: FlagTable | None = None) -> Ablation:
    """Read an ablation. `root` is the checkout, `table` the flags of the training scripts; without it neither flags nor
    script are checked."""
    content = _read(file)
    base = _base_recipe(file, content)
    if table is not None:
        check_script(base, file.parent / content["base"], root)
    seeds = _seeds(file, content.get("seeds"))
    try:
        variants = _with_references(_variants(file, content, base), content.get("reference"))
        for variant in variants if table is not None else ():
            check_flags(variant.recipe.flags, table or {})
    except LaunchError as error:
        raise error if str(error).startswith(str(file)) else LaunchError(f"{file}: {error}") from None
    folder = root / str(expanded(content.get("folder", f"runs/ablations/{file.stem}"), f"{file}: folder"))
    runs = tuple(
        PlannedRun(
            variant,
            seed,
            _identified(variant.recipe, file.stem, variant, seed),
            folder / f"{variant.name}-seed-{seed}",
        )
        for seed, variant in itertools.product(seeds, variants)
    )
    return Ablation(file.stem, file, folder, variants, seeds, runs)


def _identified(recipe: Recipe, ablation: str, variant: Variant, seed: int) -> Recipe:
    """The recipe with its seed and, where it logs to wandb, a group, a job type and tags for it; flags given win."""
    flags: dict[str, FlagValue] = {"seed": seed}
    if "wandb-project" in recipe.flags:
        tags: list[str | int | float] = [f"{axis}={value}" for axis, value in variant.settings.items()]
        ours: dict[str, FlagValue] = {
            "wandb-group": ablation,
            "wandb-job-type": variant.name,
            "wandb-tags": [*tags, f"seed={seed}"],
        }
        flags |= {name: value for name, value in ours.items() if name not in recipe.flags}
    return recipe.overridden(flags)


def _read(file: Path) -> dict:
    content = read_mapping(file, _KEYS, "no such ablation")
    for key in ("base", "axes", "seeds"):
        if content.get(key) is None:
            raise LaunchError(f"{file}: no {key}")
    check_base(file, content["base"])
    folder = content.get("folder", "-")
    if not isinstance(folder, str) or not folder.strip():
        raise LaunchError(f"{file}: folder is {folder!r}, the name of a folder is wanted")
    check_text(folder, f"{file}: folder")
    return content


def _table(file: Path, content: Mapping, key: str) -> dict[str, object]:
    table = {} if content.get(key) is None else content[key]
    if not isinstance(table, dict):
        raise LaunchError(f"{file}: {key} is a {type(table).__name__}, a mapping is wanted")
    return {str(name): value for name, value in table.items()}


def _base_recipe(file: Path, content: Mapping) -> Recipe:
    """The base recipe with processes, environment and flags of the YAML."""
    recipe = load_recipe(file.parent / content["base"])
    processes = content.get("processes", recipe.processes)
    if not is_whole(processes, 1):
        raise LaunchError(f"{file}: processes is {processes!r}, a whole number from 1 is wanted")
    environment = {
        name: expanded(value, f"{file}: environment: {name}")
        for name, value in _table(file, content, "environment").items()
    }
    variables = check_environment(environment, f"{file}: environment")
    if "WANDB_RUN_ID" in {**recipe.environment, **variables}:
        raise LaunchError(f"{file}: environment: WANDB_RUN_ID: {OWNED_FLAGS['wandb-run-id']}; leave it out")
    flags = {
        name: flag_value(value, f"{file}: flags: {name}") for name, value in _table(file, content, "flags").items()
    }
    for name in OWNED_FLAGS:
        _check_not_owned(file, f"flags: {name}", name, flags.get(name, False))
        if name not in flags:
            _check_not_owned(file, f"base: {content['base']} has {name}", name, recipe.flags.get(name, False))
    if "seed" in flags:
        raise LaunchError(f"{file}: flags: seed: the seeds stand in seeds")
    logged = {name: True for name in _LOGGED if name not in recipe.flags}
    return replace(
        recipe,
        processes=processes,
        environment={**recipe.environment, **variables},
        flags=_laid_over(recipe.flags, logged | flags),
    )


def _check_not_owned(file: Path, where: str, name: str, value: FlagValue) -> None:
    """Raise LaunchError for a flag that several runs cannot have in common; false takes one away and is none."""
    if name in OWNED_FLAGS and value is not False:
        raise LaunchError(
            f"{file}: {where}: {OWNED_FLAGS[name]}. Leave it out, or write flags: {{{name}: false}} to take the base "
            "recipe's away"
        )


def _laid_over(flags: Mapping[str, FlagValue], over: Mapping[str, FlagValue]) -> dict[str, FlagValue]:
    """Flags with others in their place; a value False takes a flag away."""
    kept = {name: value for name, value in flags.items() if name not in over}
    return kept | {name: value for name, value in over.items() if value is not False}


def _seeds(file: Path, seeds: object) -> tuple[int, ...]:
    if not isinstance(seeds, list) or not seeds:
        raise LaunchError(f"{file}: seeds is {seeds!r}, a list of whole numbers from 1 is wanted")
    for seed in seeds:
        if not is_whole(seed, 1):
            raise LaunchError(f"{file}: seeds: {seed!r} is no whole number from 1")
        if seeds.count(seed) > 1:
            raise LaunchError(f"{file}: seeds: {seed} stands there {seeds.count(seed)} times")
    return tuple(seeds)


def _combinations(file: Path, axes: object) -> Iterator[dict[str, object]]:
    """Every combination of axis values, in the order of the YAML."""
    for block in axes if isinstance(axes, list) else [axes]:
        if not isinstance(block, dict) or not block:
            raise LaunchError(f"{file}: axes: {block!r}: a mapping from axes to their values is wanted")
        values = {}
        for axis, listed in block.items():
            values[str(axis)] = listed if isinstance(listed, list) else [listed]
            if not values[str(axis)]:
                raise LaunchError(f"{file}: axes: {axis} has no value")
            values[str(axis)] = [flag_value(value, f"{file}: axes: {axis}") for value in values[str(axis)]]
            for value in values[str(axis)]:
                _check_not_owned(file, f"axes: {axis}", str(axis), value)
        if "seed" in values:
            raise LaunchError(f"{file}: axes: seed: the seeds stand in seeds")
        for combination in itertools.product(*values.values()):
            yield dict(zip(values, combination, strict=True))


def _variants(file: Path, content: Mapping, base: Recipe) -> list[Variant]:
    variants: list[Variant] = []
    for settings in _combinations(file, content["axes"]):
        set_by = {name: f"flags: {name}" for name in _table(file, content, "flags")}
        flags: dict[str, FlagValue] = {}
        for axis, value in settings.items():
            new = flags_of(axis, value, base.flags)
            for name in new:
                if name in set_by:
                    raise LaunchError(f"{set_by[name]} and axes: {axis} both set --{name}: keep one of them")
                set_by[name] = f"axes: {axis}"
            flags |= new
        recipe = replace(base, flags=_laid_over(base.flags, flags))
        check_streams(recipe.flags, settings)
        name = "-".join(filter(None, (label_of(axis, value) for axis, value in settings.items()))) or "base"
        if len(name.encode()) > _LONGEST_NAME:
            raise LaunchError(
                f"axes: {_said(settings):.80}... gives its run folders a name of {len(name.encode())} bytes, at most "
                f"{_LONGEST_NAME} are wanted: shorten the values, with a variable for a path that they share"
            )
        for other in variants:
            both = f"axes: {_said(settings)} and {_said(other.settings)}"
            if _as_numbers(other.recipe.flags) == _as_numbers(recipe.flags):
                raise LaunchError(f"{both} are the same run: keep one")
            if other.name == name:
                raise LaunchError(f"{both} would share the run folder's name {name}: change a value's spelling")
        variants.append(Variant(name, settings, recipe))
    return variants


def _as_numbers(flags: Mapping[str, FlagValue]) -> dict[str, object]:
    """Flags to compare: 1e-3 is text for YAML, and the number 0.001 for the trainer."""

    def number(value: object) -> object:
        if isinstance(value, bool):
            return value
        try:
            return float(str(value))
        except ValueError:
            return value

    return {
        name: [number(v) for v in value] if isinstance(value, list) else number(value) for name, value in flags.items()
    }


def _said(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in settings.items())


def _with_references(variants: list[Variant], reference: object) -> tuple[Variant, ...]:
    """The variants, each with the name of the one that it is compared with."""
    wanted = {"streams": 1} if reference is None else reference
    if not isinstance(wanted, dict) or not wanted:
        raise LaunchError(f"reference is {reference!r}, a mapping from axes to one value each is wanted")
    candidates = [v for v in variants if all(a in v.settings and v.settings[a] == x for a, x in wanted.items())]
    if not candidates:
        raise LaunchError(
            f"reference: no variant has {_said(wanted)}: add it to axes, or write reference: {{AXIS: VALUE}}"
        )
    found = []
    for variant in variants:
        fixed = {a: x for a, x in variant.settings.items() if a not in wanted and a not in WIDE_AXES}
        same = [
            c
            for c in candidates
            if {a: x for a, x in c.settings.items() if a not in wanted and a not in WIDE_AXES} == fixed
        ]
        if variant in candidates and variant in same and len(same) == 1:
            found.append(variant)
        elif len(same) == 1:
            found.append(replace(variant, reference=same[0].name))
        else:
            names = ", ".join(c.name for c in same) or "none"
            raise LaunchError(
                f"reference: {variant.name} is to be compared with one variant that has {_said(wanted)} and its other "
                f"settings; there is {names}"
            )
    return tuple(found)
