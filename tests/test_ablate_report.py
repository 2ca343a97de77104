"""A report says what the runs logged: means, paired intervals, honest verdicts, and every run that is missing."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_corpus import tool
from harness_events import write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from megatron.ablations import cost, plots
from megatron.ablations.description import Ablation, load_ablation
from megatron.ablations.paired import paired_difference, spread
from megatron.ablations.plots import draw
from megatron.ablations.report import Report, markdown, write_report
from megatron.run_control.attempts import begin_attempt, end_attempt
from megatron.run_control.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
YAML = f"""base: {ROOT}/scripts/recipes/tiny-gpt.yaml
axes: [{{streams: 1}}, {{streams: [2, 4], retention: [false, true]}}]
seeds: [1, 2, 3]
"""
LOSSES = {  # by seed 1, 2, 3
    "ordinary": (5.0, 5.2, 5.1),
    "streams-2": (4.9, 5.08, 5.01),  # lower on every seed, by about the same
    "streams-2-retention": (5.3, 5.2, 4.9),  # all over the place
    "streams-4": (5.4, 5.62, 5.5),  # higher
}


@dataclass
class Logged:
    """What tools/compare_runs.py would have read."""

    validation_loss: float | None
    parameters: int | None = 1000
    controller_parameters: int | None = 12
    tokens: int = 640
    train_loss: float = 5.5
    tokens_per_second: float | None = 2000.0
    peak_memory_bytes: int | None = None
    tokens_per_step: int = 64
    train_curve: dict[int, float] = field(default_factory=lambda: {step: 6 - step / 10 for step in range(1, 11)})


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Four variants that have finished and one, streams-4-retention, that was never run."""
    (tmp_path / "trial.yaml").write_text(YAML)
    ablation = load_ablation(tmp_path / "trial.yaml", tmp_path)
    measured = {f"{n}-seed-{s}": Logged(loss) for n, losses in LOSSES.items() for s, loss in enumerate(losses, 1)}
    return Report(ablation, measured, _states(ablation, measured))


def _states(ablation: Ablation, measured: dict) -> dict[str, str]:
    return {run.name: "finished" if run.name in measured else "absent" for run in ablation.runs}


def test_the_interval_by_hand() -> None:
    # Differences -0.1, -0.12, -0.09: mean -0.10333, s 0.0152753, t(0.975, 2) = 4.302653 (tables), half 0.0379460.
    found = paired_difference(dict(enumerate(LOSSES["streams-2"])), dict(enumerate(LOSSES["ordinary"])))
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1033333, -0.1412794, -0.0653873), abs=1e-6)
    assert found.verdict == "lower"
    assert spread([1.0, 2.0, 3.0]) == spread((1.0, 2.0, 3.0))
    three = spread([1.0, 2.0, 3.0])
    assert three is not None
    assert (three.n, three.mean, three.deviation) == (3, 2.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), min_size=2, max_size=8))
def test_the_interval_is_scipys_and_the_verdict_is_its_p_value(pairs: list[tuple[float, float]]) -> None:
    ours, others = ({seed: pair[at] for seed, pair in enumerate(pairs)} for at in (0, 1))
    found = paired_difference(ours, others)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    differences = [found.by_seed[seed] for seed in ours]
    if max(differences) - min(differences) < 1e-6:
        assert found.high - found.low < 1e-4, "equal differences leave no doubt"
        return
    wanted = stats.ttest_rel(list(ours.values()), list(others.values()))
    low, high = wanted.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9, rel=1e-9)
    if not math.isclose(wanted.pvalue, 0.05, abs_tol=1e-6):
        assert (found.verdict == "no difference seen") == (wanted.pvalue > 0.05)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.integers(1, 9), st.floats(1, 9), max_size=6),
    st.dictionaries(st.integers(1, 9), st.floats(1, 9), max_size=6),
    st.floats(-5, 5),
)
def test_a_difference_has_the_common_seeds_changes_sign_with_its_sides_and_no_shift(
    ours: dict[int, float], others: dict[int, float], shift: float
) -> None:
    found, back = paired_difference(ours, others), paired_difference(others, ours)
    common = ours.keys() & others.keys()
    if not common:
        assert found is None
        assert back is None
        return
    assert found is not None
    assert back is not None
    assert set(found.by_seed) == common
    assert found.mean == pytest.approx(-back.mean)
    shifted = paired_difference({s: v + shift for s, v in ours.items()}, {s: v + shift for s, v in others.items()})
    assert shifted is not None
    assert shifted.mean == pytest.approx(found.mean, abs=1e-9)
    if len(common) == 1:
        assert found.low is None
        assert found.verdict == "one seed: nothing can be said"


def test_equal_losses_are_no_difference_seen() -> None:
    same = {1: 5.0, 2: 5.1}
    found = paired_difference(same, same)
    assert found is not None
    assert (found.mean, found.low, found.high, found.verdict) == (0, 0, 0, "no difference seen")


def test_a_loss_that_is_not_finite_is_a_verdict_and_never_averaged() -> None:
    nan, inf = math.nan, math.inf
    for values in ([nan, 1.0], [1.0, inf], [inf, -inf], [nan], [inf, 1.0, 2.0]):
        found = spread(values)
        assert found is not None
        assert (found.n, math.isnan(found.mean), found.deviation) == (len(values), True, None)
    for ours, others in (
        ({1: nan, 2: 5.0}, {1: 5.0, 2: 5.0}),
        ({1: inf}, {1: inf}),
        ({1: 1.0, 2: 2.0}, {1: inf, 2: 1}),
    ):
        difference = paired_difference(ours, others)
        assert difference is not None
        assert (difference.verdict, difference.low, difference.high) == ("not finite", None, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_said_in_table_csv_and_pictures(
    report: Report, tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = report.measured["streams-2-seed-3"]
    run.validation_loss, run.train_loss, run.train_curve[5] = value, value, value
    page = markdown(report, "", "", plots=False)
    assert f"| streams-2 | ordinary | 3 | - | - | -0.1000, -0.1200, {value:+.4f} | **not finite** |" in page
    assert "| streams-2 | 3 | 1,000 + 12 | not finite | not finite | 2,000 ± 0 | - |" in page
    assert "**Not finite: streams-2**: a validation loss" in page
    assert "seen for streams-4 (higher by 0.4067)." in page
    write_report(report, tmp_path / "out", "", "")
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert {row["run"]: row["validation_loss"] for row in rows}["streams-2-seed-3"] == str(value)
    losses = [
        row for row in csv.DictReader((tmp_path / "out" / "differences.csv").open()) if row["measure"] == "train_loss"
    ]
    assert {row["variant"]: row["verdict"] for row in losses}["streams-2"] == "not finite"
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, file: figures.append(figure))
    assert draw(report, tmp_path)
    (left, right), (dots,) = (figure.axes for figure in figures)
    for axes in (left, right):
        curve = next(line for line in axes.lines if str(line.get_label()).startswith("streams-2 "))
        assert curve.get_label() == "streams-2 (not finite: points left out)"
        assert np.flatnonzero(np.isnan(curve.get_ydata())).tolist() == [4], "only the step itself is left out"
    labels = [label.get_text() for label in dots.get_yticklabels()]
    assert labels[0] == "streams-2 minus ordinary (not finite: points left out)"
    circles = [line.get_ydata() for line in dots.lines if line.get_marker() == "o"]
    assert [len(rows) for rows in circles] == [2, 3, 3], "two seeds of streams-2 have a circle, three of the others"


def test_the_page_says_what_was_seen_what_was_not_and_what_is_missing(report: Report) -> None:
    page = markdown(report, "On one core.", "python tools/ablate.py run x", plots=True)
    missing = ", ".join(f"streams-4-retention-seed-{seed} (absent)" for seed in (1, 2, 3))
    assert f"3 of 15 runs are missing, unfinished or unreadable** and count in no number: {missing}." in page
    assert "seen for streams-2 (lower by 0.1033), streams-4 (higher by 0.4067)." in page
    assert "No difference seen for streams-2-retention: the interval holds 0." in page
    assert "| streams-2 | ordinary | 3 | -0.1033 | -0.1413 to -0.0654 | -0.1000, -0.1200, -0.0900 | **lower** |" in page
    assert "| ordinary | 3 | 1,000 + 12 | 5.1000 ± 0.1000 | 5.5000 ± 0.0000 | 2,000 ± 0 | - |" in page
    assert "| streams-4-retention | ordinary | 0 | - | - | - | no pair of finished runs |" in page
    assert "rankings of small models do not transfer to large ones" in page
    assert "the same number of tokens, 640" in page
    assert "Of 3 intervals at 95%" in page
    assert "On one core." in page


def test_unequal_tokens_are_said(report: Report) -> None:
    report.measured["ordinary-seed-1"].tokens = 128
    assert "**The runs did not train on equal tokens**: 128, 640." in markdown(report, "", "", plots=False)


def test_files_hold_every_run_and_the_pictures(report: Report, tmp_path: Path) -> None:
    out = tmp_path / "out"
    files = write_report(report, out, "", "python tools/ablate.py run x", draw)
    assert sorted(file.name for file in files) == sorted(file.name for file in out.iterdir())
    assert {"report.md", "results.csv", "differences.csv", "loss_curves.png", "differences.png"} == {
        file.name for file in files
    }
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG"), file
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert len(rows) == 15
    assert rows[1]["run"] == "streams-2-seed-1"
    assert float(rows[1]["validation_loss"]) == 4.9
    assert [row["state"] for row in rows].count("absent") == 3
    assert rows[4]["validation_loss"] == "", "a run that is missing has no number"
    differences = {row["variant"]: row for row in csv.DictReader((out / "differences.csv").open())}
    assert differences["streams-2"]["measure"] in ("validation_loss", "train_loss", "tokens_per_second")


def test_no_finished_run_is_a_page_that_says_so_without_pictures_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none.yaml"
    file.write_text(YAML + f"folder: {tmp_path}/runs\n")
    ablate = tool("ablate")
    command = ["report", str(file), "--output", str(tmp_path / "out")]
    assert ablate.main(command) == 1
    assert "not in the report: ordinary-seed-1 (absent)" in capsys.readouterr().err
    assert ablate.main([*command, "--partial"]) == 1
    assert "has finished, the report is empty" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.png"))
    page = (tmp_path / "out" / "report.md").read_text()
    assert "15 of 15 runs are missing" in page
    assert "**No run has finished: there is nothing to compare yet.**" in page
    assert "equal tokens" not in page


def test_a_report_that_cannot_be_written_says_where_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.yaml"
    file.write_text(YAML + f"folder: {tmp_path}/runs\n")
    for output, why in (
        (file, f"{file} is no folder"),
        (file / "x" / "y", f"{file} is no folder"),
        (Path("/proc/x"), "/proc"),
        (Path("/proc"), "/proc"),
    ):
        before = file.read_text()
        assert tool("ablate").main(["report", str(file), "--output", str(output)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: the report cannot be written to {output}: {why}")
        assert said.endswith(". Name another folder by --output\n")
        assert file.read_text() == before


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The YAML of an ablation whose six runs have finished: one logged a NaN, one lost its TensorBoard files, one's
    attempts.json is damaged."""
    file = tmp_path / "trial.yaml"
    base = f"base: {ROOT}/scripts/recipes/tiny-gpt.yaml\nfolder: {tmp_path}/runs\n"
    file.write_text(base + "axes: {streams: [1, 2]}\nseeds: [1, 2, 3]\n")
    for run in load_ablation(file, tmp_path).runs:
        folder = RunFolder(run.folder)
        folder.create(run.recipe, ROOT)
        begin_attempt(folder)
        end_attempt(folder, 0)
        loss = math.nan if run.name == "streams-2-seed-1" else 5.0 + run.seed / 10
        if run.name != "streams-2-seed-2":
            write_run(run.folder / "tensorboard", {1: 6.0, 2: 5.5}, **{"lm loss validation": {2: loss}})
    (tmp_path / "runs" / "ordinary-seed-3" / "attempts.json").write_text("[{")
    return file


def test_an_unreadable_run_is_an_error_that_names_it_and_left_out_by_partial(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ablate, out = tool("ablate"), folders.parent / "out"
    command = ["report", str(folders), "--output", str(out)]
    assert ablate.main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: streams-2-seed-2 cannot be read: ")
    assert str(folders.parent / "runs" / "streams-2-seed-2") in said
    assert not out.exists()
    assert ablate.main([*command, "--partial"]) == 0
    said = capsys.readouterr().err
    page = (out / "report.md").read_text()
    for name, reason in (("streams-2-seed-2", "no TensorBoard files"), ("ordinary-seed-3", "attempts.json is damaged")):
        line = next(line for line in said.splitlines() if line.startswith(f"not in the report: {name} (unreadable: "))
        assert reason in line
        assert line.removeprefix("not in the report: ") in page
    assert "2 of 6 runs are missing, unfinished or unreadable" in page
    assert "| streams-2 | ordinary | 1 | - | - | +nan | **not finite** |" in page
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [row["validation_loss"][:3] for row in rows] == ["5.0", "nan", "5.1", "", "", "5.3"]


def test_a_plan_is_printed_though_runs_cannot_be_read(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parameters and FLOPs come from a process of its own, which takes seconds and is not what is tried here.
    monkeypatch.setattr(cost, "model_costs", lambda ablation, root: [{} for _ in ablation.variants])
    assert tool("ablate").main(["plan", str(folders)]) == 0
    said = capsys.readouterr().out
    assert "note: streams-2-seed-2 cannot be read and says nothing of speed: " in said
    assert "note: ordinary-seed-3 cannot be read and says nothing of speed: " in said
    assert "note: run will refuse: " in said
