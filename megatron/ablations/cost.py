"""What an ablation costs before it is run: parameters, tokens, floating-point operations, time from a measured speed.

    costs = variant_costs(ablation, root, speeds)     # speeds: {variant: measured tokens/s}
    costs["streams-4"].parameters, .tokens, .flops, .seconds, .error

The time is tokens over tokens/s: that of a variant's own finished runs, else that of the other variants' in proportion
to the FLOPs of a token (`guessed`). It holds steps only, not starts, evaluations and saves.

What always holds: a number that cannot be known is None, and `error` says why.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.ablations.axes import as_number
from megatron.ablations.description import Ablation, Variant
from megatron.run_control.recipes import flag_arguments


@dataclass(frozen=True)
class Cost:
    """One run of a variant."""

    tokens: int | None
    parameters: int | None = None
    controllers: int | None = None
    flops: float | None = None
    seconds: float | None = None
    guessed: bool = False
    error: str | None = None


def model_costs(ablation: Ablation, root: Path) -> list[dict]:
    """What megatron/ablations/model_cost.py says of every variant, in a process of its own."""
    models = [(variant.recipe.script, flag_arguments(variant.recipe.flags)) for variant in ablation.variants]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "costs.json"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "megatron.ablations.model_cost", str(out)],
            input=json.dumps(models),
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return json.loads(out.read_text())
    error = (done.stderr.strip() or "-").splitlines()[-1]
    return [{"error": error} for _ in models]


def steps_of(variant: Variant) -> float | None:
    """Optimizer steps of a run; None where the flags do not say."""
    steps, samples, batch = (
        as_number(variant.recipe.flags.get(name)) for name in ("train-iters", "train-samples", "global-batch-size")
    )
    return samples / batch if samples and batch else steps


def variant_costs(ablation: Ablation, root: Path, speeds: Mapping[str, float]) -> dict[str, Cost]:
    """The cost of one run of every variant."""
    models = dict(zip((variant.name for variant in ablation.variants), model_costs(ablation, root), strict=True))
    found = {}
    for variant in ablation.variants:
        tokens, steps, model = ablation.tokens(variant), steps_of(variant), models[variant.name]
        flops = model["flops_per_step"] * steps if "flops_per_step" in model and steps else None
        found[variant.name] = Cost(
            tokens, model.get("parameters"), model.get("controllers"), flops, error=model.get("error")
        )
    return {name: _with_time(name, found, speeds) for name in found}


def _with_time(name: str, costs: Mapping[str, Cost], speeds: Mapping[str, float]) -> Cost:
    """The cost with its time, where a speed is known."""
    cost = costs[name]
    if not cost.tokens:
        return cost
    if name in speeds:
        return _timed(cost, cost.tokens / speeds[name], guessed=False)
    rates = [  # FLOP/s
        speeds[other] * (costs[other].flops or 0) / (costs[other].tokens or 1) for other in speeds if costs[other].flops
    ]
    if not rates or not cost.flops:
        return cost
    return _timed(cost, cost.flops / statistics.fmean(rates), guessed=True)


def _timed(cost: Cost, seconds: float, guessed: bool) -> Cost:
    return Cost(cost.tokens, cost.parameters, cost.controllers, cost.flops, seconds, guessed, cost.error)
