"""What `tools/ablate.py plan` prints: one row a variant, the totals, and what deserves a word.

    print_plan(ablation, costs, all_flags=False)

What always holds: what cannot be known is shown as "-"; a time that was scaled from other variants begins with "~".
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping

from megatron.ablations.cost import Cost
from megatron.ablations.description import Ablation, Variant
from megatron.ablations.state import check_folders, other_folders, state_of
from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import flag_arguments


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.4 h, 5.1 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def common_flags(ablation: Ablation) -> dict[str, object]:
    """Flags that all variants have with one value."""
    first, *rest = (variant.recipe.flags for variant in ablation.variants)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in rest)}


def own_flags(ablation: Ablation, variant: Variant) -> str:
    """The flags in which a variant differs from the others."""
    common = common_flags(ablation)
    return shlex.join(flag_arguments({n: v for n, v in variant.recipe.flags.items() if n not in common}))


def _row(ablation: Ablation, variant: Variant, cost: Cost) -> list[str]:
    parameters = "-" if cost.parameters is None else f"{cost.parameters:,}"
    if cost.controllers:
        parameters += f" + {cost.controllers:,}"
    states = Counter(state_of(run) for run in ablation.runs if run.variant.name == variant.name)
    time = "-" if cost.seconds is None else f"{'~' if cost.guessed else ''}{duration(cost.seconds)}"
    return [
        variant.name,
        own_flags(ablation, variant) or "(none)",
        parameters,
        "-" if cost.tokens is None else f"{cost.tokens:,}",
        "-" if cost.flops is None else f"{cost.flops:.3g}",
        time,
        f"{states['finished']}/{len(ablation.seeds)}",
    ]


def totals(ablation: Ablation, costs: Mapping[str, Cost]) -> str:
    """One sentence: runs, tokens, FLOPs, time of all, and of what is left."""
    todo = Counter(run.variant.name for run in ablation.runs if state_of(run) != "finished")

    def total(counts: Mapping[str, int]) -> str:
        wanted = [(costs[name], count) for name, count in counts.items() if count]
        tokens = [c.tokens * n for c, n in wanted if c.tokens is not None]
        flops = [c.flops * n for c, n in wanted if c.flops is not None]
        seconds = [c.seconds * n for c, n in wanted if c.seconds is not None]
        parts = [f"{sum(counts.values())} runs"]
        parts += [f"{sum(tokens):,} tokens"] if len(tokens) == len(wanted) else []
        parts += [f"{sum(flops):.3g} FLOPs"] if len(flops) == len(wanted) else []
        parts += (
            [f"{duration(sum(seconds))} of steps one after another"] if wanted and len(seconds) == len(wanted) else []
        )
        return ", ".join(parts)

    everything = Counter(run.variant.name for run in ablation.runs)
    return f"all: {total(everything)}; to do: {total(todo)}"


def remarks(ablation: Ablation, costs: Mapping[str, Cost]) -> list[str]:
    """What deserves a word before hours are spent."""
    said = []
    if len(ablation.seeds) == 1:
        said.append("one seed: the report will have no spread and no interval")
    if len({cost.tokens for cost in costs.values()}) > 1:
        said.append("the variants do not train on equal tokens")
    if all(cost.seconds is None for cost in costs.values()):
        said.append("no time: no run has finished, so that no speed was measured")
    errors = {cost.error for cost in costs.values() if cost.error}
    said += [f"parameters and FLOPs unknown: {error}" for error in sorted(errors)]
    try:
        check_folders(ablation)
    except LaunchError as error:
        said.append(f"run will refuse: {error}")
    others = other_folders(ablation)
    if others:
        said.append(f"run folders that the YAML does not name: {', '.join(others)}")
    return said


def print_plan(ablation: Ablation, costs: Mapping[str, Cost], all_flags: bool) -> None:
    """Print everything."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("variant", box=box.SIMPLE_HEAD)
    table.add_column("its own flags", overflow="fold")
    for heading in ("parameters", "tokens", "FLOPs", "time", "finished"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in ablation.variants:
        table.add_row(*_row(ablation, variant, costs[variant.name]))
    console = Console(width=max(Console().width, 140))
    seeds = ", ".join(map(str, ablation.seeds))
    script = ablation.variants[0].recipe.script
    console.print(f"{ablation.name}: {script}, seeds {seeds}, run folders in {ablation.folder}", highlight=False)
    console.print(table)
    console.print(totals(ablation, costs), highlight=False, soft_wrap=True)
    for remark in remarks(ablation, costs):
        console.print(f"note: {remark}", highlight=False, markup=False, soft_wrap=True)
    if all_flags:
        for variant in ablation.variants:
            line = shlex.join([variant.recipe.script, *flag_arguments(variant.recipe.flags)])
            console.print(f"\n{variant.name}: {line}", highlight=False, markup=False, soft_wrap=True)
