"""The tables of a finished ablation, as Markdown and CSV.

    report = Report(ablation, {"ordinary-seed-1": measured, ...}, states)
    write_report(report, folder, note, command)      # report.md, results.csv, differences.csv

What always holds: every run that is missing, unfinished or unreadable is named and counts in no number; a value that no
run logged is shown as "-" and left empty in CSV; one that is NaN or infinite makes its mean "not finite" (nan in CSV);
files are written beside and renamed into place.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.ablations.description import Ablation, Variant
from megatron.ablations.paired import CONFIDENCE, NOT_FINITE, Difference, paired_difference, spread
from megatron.ablations.provenance import provenance
from megatron.run_control.errors import LaunchError, why_no_folder
from megatron.run_control.run_folder import write_whole

CURVES, DIFFERENCES = "loss_curves.png", "differences.png"
_SEEN = ("lower", "higher")
_RUN_COLUMNS = (
    "parameters",
    "controller_parameters",
    "tokens",
    "train_loss",
    "validation_loss",
    "tokens_per_second",
    "peak_memory_bytes",
)


class Measured(Protocol):
    """What a run logged; tools/compare_runs.py reads it. Losses are nats per token, curves map steps to losses."""

    parameters: int | None
    controller_parameters: int | None
    tokens: int
    train_loss: float
    validation_loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    tokens_per_step: int
    train_curve: dict[int, float]


@dataclass(frozen=True)
class Report:
    """An ablation, what its finished runs logged (by run name), and the state of all of them; an unreadable run's state
    says why it is."""

    ablation: Ablation
    measured: Mapping[str, Measured]
    states: Mapping[str, str]

    @property
    def unfinished(self) -> list[str]:
        """Runs that count in no number, with their state."""
        runs = [run.name for run in self.ablation.runs if run.name not in self.measured]
        return [f"{name} ({self.states[name]})" for name in runs]

    def runs_of(self, variant: Variant) -> dict[int, Measured]:
        """Finished runs of a variant by seed."""
        runs = [run for run in self.ablation.runs if run.variant.name == variant.name]
        return {run.seed: self.measured[run.name] for run in runs if run.name in self.measured}

    def values(self, variant: Variant, column: str) -> dict[int, float]:
        """What was measured, by seed, without the runs that did not log it."""
        found = {seed: getattr(run, column) for seed, run in self.runs_of(variant).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def reference_of(self, variant: Variant) -> Variant | None:
        """The variant that this one is compared with."""
        return next((other for other in self.ablation.variants if other.name == variant.reference), None)

    def difference(self, variant: Variant, column: str = "validation_loss") -> Difference | None:
        """Paired differences from the reference."""
        reference = self.reference_of(variant)
        if reference is None:
            return None
        return paired_difference(self.values(variant, column), self.values(reference, column))


def _mean(report: Report, variant: Variant, column: str, style: str, scale: float = 1.0) -> str:
    """`5.6123 ± 0.0042`: mean and sample standard deviation over the seeds."""
    found = spread([value * scale for value in report.values(variant, column).values()])
    if found is None:
        return "-"
    if not math.isfinite(found.mean):
        return NOT_FINITE
    return f"{found.mean:{style}}" + ("" if found.deviation is None else f" ± {found.deviation:{style}}")


def _parameters(report: Report, variant: Variant) -> str:
    counts = {(run.parameters, run.controller_parameters or 0) for run in report.runs_of(variant).values()}
    texts = sorted("-" if base is None else f"{base:,}" + (f" + {own:,}" if own else "") for base, own in counts)
    return ", ".join(texts) or "-"


def _markdown(headings: list[str], rows: list[list[str]], words: Sequence[str] = ()) -> str:
    """A Markdown table; columns are aligned to the right, but for the first and those of `words`."""
    rule = ["---" if at == 0 or heading in words else "--:" for at, heading in enumerate(headings)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rule, *rows])


def means_table(report: Report) -> str:
    """One row a variant: means and spreads."""
    rows = [
        [
            variant.name,
            str(len(report.runs_of(variant))),
            _parameters(report, variant),
            _mean(report, variant, "validation_loss", ".4f"),
            _mean(report, variant, "train_loss", ".4f"),
            _mean(report, variant, "tokens_per_second", ",.0f"),
            _mean(report, variant, "peak_memory_bytes", ",.0f", 2**-20),
        ]
        for variant in report.ablation.variants
    ]
    headings = ["variant", "seeds", "parameters", "validation loss", "train loss", "tokens/s", "peak memory, MiB"]
    return _markdown(headings, rows)


def differences_table(report: Report) -> str:
    """One row a variant that has a reference: paired differences of the validation loss."""
    rows = []
    for variant in report.ablation.variants:
        if variant.reference is None:
            continue
        found = report.difference(variant)
        if found is None:
            rows.append([variant.name, variant.reference, "0", "-", "-", "-", "no pair of finished runs"])
            continue
        interval = "-" if found.low is None else f"{found.low:+.4f} to {found.high:+.4f}"
        seeds = ", ".join(f"{value:+.4f}" for value in found.by_seed.values())
        verdict = f"**{found.verdict}**" if found.verdict in (*_SEEN, NOT_FINITE) else found.verdict
        mean = f"{found.mean:+.4f}" if math.isfinite(found.mean) else "-"
        rows.append([variant.name, variant.reference, str(found.n), mean, interval, seeds, verdict])
    headings = ["variant", "minus", "pairs", "mean", f"{CONFIDENCE:.0%} interval", "each seed", "validation loss is"]
    return _markdown(headings, rows, words=("minus", "validation loss is"))


def _tokens_sentence(report: Report) -> str:
    if not report.measured:
        return "**No run has finished: there is nothing to compare yet.**"
    tokens = {run.tokens for variant in report.ablation.variants for run in report.runs_of(variant).values()}
    if len(tokens) == 1:
        return f"Every run trained on the same number of tokens, {tokens.pop():,}."
    return f"**The runs did not train on equal tokens**: {', '.join(f'{count:,}' for count in sorted(tokens))}."


def conclusion(report: Report) -> str:
    """What the intervals allow to say, in a few sentences."""
    found = {v.name: report.difference(v) for v in report.ablation.variants if v.reference is not None}
    seen = [f"{name} ({d.verdict} by {abs(d.mean):.4f})" for name, d in found.items() if d and d.verdict in _SEEN]
    unseen = [name for name, d in found.items() if d and d.verdict == "no difference seen"]
    infinite = [name for name, d in found.items() if d and d.verdict == NOT_FINITE]
    parts = []
    if infinite:
        parts.append(
            f"**Not finite: {', '.join(infinite)}**: a validation loss of the variant or of its reference is NaN or "
            "infinite, so that nothing was averaged."
        )
    if seen:
        parts.append(f"A difference of the validation loss from the reference was seen for {', '.join(seen)}.")
    if unseen:
        parts.append(f"No difference seen for {', '.join(unseen)}: the interval holds 0.")
    intervals = sum(d is not None and d.low is not None for d in found.values())
    if intervals > 1:
        parts.append(
            f"Of {intervals} intervals at {CONFIDENCE:.0%} some miss the truth by chance: with no difference "
            f"anywhere, {intervals * (1 - CONFIDENCE):.1f} would leave 0 out on average."
        )
    return " ".join(parts)


def markdown(report: Report, note: str, command: str, plots: bool) -> str:
    """The page."""
    ablation = report.ablation
    parts = [f"# Ablation {ablation.name}"]
    if report.unfinished:
        parts.append(
            f"**Incomplete: {len(report.unfinished)} of {len(ablation.runs)} runs are missing, unfinished or "
            f"unreadable** and count in no number: {', '.join(report.unfinished)}."
        )
    parts += [
        f"{len(ablation.variants)} variants, seeds {', '.join(map(str, ablation.seeds))}. {_tokens_sentence(report)} "
        "What is measured here holds for models of this size, this data and this many tokens: rankings of small models "
        "do not transfer to large ones.",
        *filter(None, (provenance([run for run in ablation.runs if run.name in report.measured]), note)),
        "\n".join(f"    {line}" for line in command.splitlines()),
        "## Validation loss against the reference",
        *filter(None, (conclusion(report),)),
        differences_table(report),
    ]
    if plots:
        parts.append(f"![Paired differences of the validation loss, with intervals]({DIFFERENCES})")
    parts += [
        "The two runs of a pair have one seed: the same base weights, the same data in the same order. The interval is "
        "that of the paired t test.",
        "## Means over seeds",
        means_table(report),
        "± is the sample standard deviation over seeds. Losses are nats per token; the train loss is the mean of the "
        "last steps. Behind + stand the stream controllers.",
    ]
    if plots:
        parts.append(f"![Loss curves: mean over seeds, the band from the lowest to the highest]({CURVES})")
    return "\n\n".join(parts) + "\n"


def _csv(headings: list[str], rows: list[list[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows([["" if value is None else value for value in row] for row in rows])
    return text.getvalue()


def runs_csv(report: Report) -> str:
    """One row a run, finished or not."""
    axes = list(dict.fromkeys(axis for variant in report.ablation.variants for axis in variant.settings))
    rows = []
    for run in report.ablation.runs:
        measured = report.measured.get(run.name)
        values: list[object] = [getattr(measured, column, None) for column in _RUN_COLUMNS]
        settings = [run.variant.settings.get(axis) for axis in axes]
        rows.append([run.name, run.variant.name, *settings, run.seed, report.states[run.name], *values])
    return _csv(["run", "variant", *axes, "seed", "state", *_RUN_COLUMNS], rows)


def differences_csv(report: Report) -> str:
    """One row a variant with a reference and a measure."""
    rows: list[list[object]] = []
    for column in ("validation_loss", "train_loss", "tokens_per_second", "peak_memory_bytes"):
        for variant in report.ablation.variants:
            found = report.difference(variant, column)
            if found is not None:
                numbers = (found.n, found.mean, found.low, found.high)
                rows.append([column, variant.name, variant.reference, *numbers, found.verdict])
    return _csv(["measure", "variant", "reference", "pairs", "mean", "low", "high", "verdict"], rows)


def write_report(
    report: Report, folder: Path, note: str, command: str, draw: Callable[[Report, Path], bool] | None = None
) -> list[Path]:
    """Write all files into a folder; returns them. `draw` writes the pictures and says whether there was anything.
    Raises LaunchError where the folder cannot be made or written."""
    try:
        return _write_files(report, folder, note, command, draw)
    except OSError as error:
        raise LaunchError(
            f"the report cannot be written to {folder}: {why_no_folder(folder, error)}. Name another folder by --output"
        ) from None


def _write_files(
    report: Report, folder: Path, note: str, command: str, draw: Callable[[Report, Path], bool] | None
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw is not None and draw(report, folder)
    texts = {
        "report.md": markdown(report, note, command, drawn),
        "results.csv": runs_csv(report),
        "differences.csv": differences_csv(report),
    }
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in [*texts, *((CURVES, DIFFERENCES) if drawn else ())]]
