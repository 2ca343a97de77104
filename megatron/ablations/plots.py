"""The pictures of a report: loss curves with a band over seeds, and a dot plot of paired differences.

    draw(report, folder)     # writes loss_curves.png and differences.png; False when no run has finished

Curves that lie on each other say little, so a second panel shows each variant's training loss minus that of its
reference, seed by seed.

What always holds: a line is the mean over the seeds that have finished, a band spans the lowest and the highest; where
a value is NaN or infinite there is no point, and the variant's label says so; files are written beside and renamed into
place.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.ablations.paired import CONFIDENCE, NOT_FINITE
from megatron.ablations.report import CURVES, DIFFERENCES, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron.ablations.description import Variant

_SMOOTHED_STEPS = 0.05  # the share of a run over which the difference panel averages
_STYLES = ("-", "--", ":", "-.")


def _curves(report: Report, variant: Variant) -> dict[int, dict[float, float]]:
    """{seed: {tokens: training loss}}"""
    return {
        seed: {step * run.tokens_per_step: loss for step, loss in run.train_curve.items()}
        for seed, run in report.runs_of(variant).items()
    }


def _stacked(curves: list[dict[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that all curves have, and losses (seed, tokens); NaN for all seeds where one is not finite."""
    tokens = sorted(set.intersection(*(set(curve) for curve in curves)))
    losses = np.array([[curve[at] for at in tokens] for curve in curves])
    return np.array(tokens), np.where(np.isfinite(losses).all(axis=0), losses, np.nan)


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """A running mean over the last axis, shorter at the start."""
    window = max(1, round(losses.shape[-1] * _SMOOTHED_STEPS))
    ends = np.arange(1, losses.shape[-1] + 1)
    starts = np.maximum(0, ends - window)

    def within(values: np.ndarray) -> np.ndarray:
        total = np.cumsum(np.pad(values, [(0, 0), (1, 0)]), axis=-1)
        return total[:, ends] - total[:, starts]

    known = np.isfinite(losses)
    means = within(np.where(known, losses, 0.0)) / (ends - starts)
    return np.where(within(1.0 - known) == 0, means, np.nan)


def _labelled(name: str, missing: bool) -> str:
    return f"{name} ({NOT_FINITE}: points left out)" if missing else name


def _band(axes: Axes, tokens: np.ndarray, losses: np.ndarray, color: str, style: str, label: str) -> None:
    label = _labelled(label, bool(np.isnan(losses).any()))
    axes.plot(tokens, losses.mean(axis=0), color=color, ls=style, lw=1.3, label=label)
    if len(losses) > 1:
        axes.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.12, lw=0)


def _save(figure: Figure, file: Path) -> None:
    from matplotlib import pyplot

    partial = file.with_name(f".{file.name}.{os.getpid()}")
    figure.savefig(partial, format="png")
    pyplot.close(figure)
    os.replace(partial, file)


def _draw_curves(report: Report, file: Path) -> None:
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=110, layout="constrained")
    for number, variant in enumerate(report.ablation.variants):
        curves = _curves(report, variant)
        if not curves:
            continue
        color, style = f"C{number % 10}", _STYLES[number // 10 % len(_STYLES)]
        _band(left, *_stacked(list(curves.values())), color, style, variant.name)
        reference = report.reference_of(variant)
        others = {} if reference is None else _curves(report, reference)
        pairs = [
            {at: curves[seed][at] - others[seed][at] for at in curves[seed].keys() & others[seed].keys()}
            for seed in curves.keys() & others.keys()
        ]
        if pairs:
            tokens, losses = _stacked(pairs)
            _band(right, tokens, _smoothed(losses), color, style, variant.name)
    left.set(xlabel="tokens", ylabel="training loss (nats per token)", title="mean over seeds; band: lowest to highest")
    right.axhline(0, color="black", lw=0.8)
    right.set(
        xlabel="tokens",
        ylabel="training loss minus the reference's",
        title="paired by seed, running mean; colors as on the left",
    )
    for axes in (left, right):
        axes.grid(alpha=0.25)
    left.legend(frameon=False, fontsize="small")
    _save(figure, file)


def _draw_differences(report: Report, file: Path) -> None:
    from matplotlib import pyplot

    shown = [(v, d) for v in report.ablation.variants if (d := report.difference(v)) is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.5 * max(len(shown), 1)), dpi=110, layout="constrained")
    for row, (_, difference) in enumerate(shown):
        seen = difference.verdict in ("lower", "higher")
        color = "C3" if seen else "0.35"
        if difference.low is not None and difference.high is not None:
            axes.plot([difference.low, difference.high], [row, row], color=color, lw=2.2, solid_capstyle="butt")
        points = [value for value in difference.by_seed.values() if math.isfinite(value)]
        axes.plot(points, [row] * len(points), "o", mfc="none", color="C0", ms=5, zorder=3)
        if math.isfinite(difference.mean):
            axes.plot(difference.mean, row, "D", color=color, ms=7, zorder=4)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(
        range(len(shown)),
        [_labelled(f"{v.name} minus {v.reference}", not math.isfinite(d.mean)) for v, d in shown],
    )
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.set(
        xlabel="validation loss minus the reference's, nats per token",
        title=f"diamond: mean; circles: seeds; bar: {CONFIDENCE:.0%} interval, red where it leaves 0 out",
    )
    axes.title.set_fontsize("medium")
    _save(figure, file)


def draw(report: Report, folder: Path) -> bool:
    """Write both pictures; returns False, and writes nothing, when no run has finished."""
    if not report.measured:
        return False
    import matplotlib

    matplotlib.use("agg")
    _draw_curves(report, folder / CURVES)
    _draw_differences(report, folder / DIFFERENCES)
    return True
