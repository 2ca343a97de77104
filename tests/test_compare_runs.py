"""tools/compare_runs.py: the numbers are those that the trainer logged, and folders that hold none are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness_events import write_run
from torch.utils.tensorboard import SummaryWriter

TOOL = Path(__file__).resolve().parent.parent / "tools/compare_runs.py"


def compare(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(
        tmp_path / "wide/tensorboard",
        {step: 8.0 / step for step in range(1, 5)},
        wide="4",
        **{
            "lm loss validation": {2: 5.0, 4: 2.5},
            "iteration-time": {2: 0.5, 3: 0.25, 4: 4.0},
            "mem-max-allocated-bytes": {1: 2.0**20, 2: 2.0**21},
        },
    )
    write_run(tmp_path / "plain", {1: 8.0, 2: 6.0})
    return tmp_path


def test_numbers_are_those_that_were_logged(runs: Path) -> None:
    done = compare(runs / "plain", runs / "wide", "--json", runs / "out/r.json", "--tail", 2)
    assert done.returncode == 0, done.stderr
    plain, wide = json.loads((runs / "out/r.json").read_text())
    assert (wide["name"], wide["num_streams"], wide["iterations"], wide["tokens"]) == ("wide", 4, 4, 128)
    assert (wide["parameters"], wide["controller_parameters"]) == (123456789, 36)
    assert wide["train_loss"] == pytest.approx((8 / 3 + 8 / 4) / 2)
    assert wide["validation_loss"] == 2.5
    assert wide["tokens_per_second"] == 32 / 0.5  # the median step
    assert wide["peak_memory_bytes"] == 2**21
    assert plain["num_streams"] == 1
    assert plain["validation_loss"] is plain["tokens_per_second"] is plain["peak_memory_bytes"] is None
    for text in ("123,456,789 + 36", "2.3333", "2.5000", "64", "2 MiB", "-"):
        assert text in done.stdout, f"{text!r} is not in the table:\n{done.stdout}"


def test_the_later_value_of_a_step_counts_after_a_resume(runs: Path) -> None:
    write_run(runs / "plain", {2: 3.0, 3: 1.0})
    assert compare(runs / "plain", "--json", runs / "r.json", "--tail", 2).returncode == 0
    (run,) = json.loads((runs / "r.json").read_text())
    assert (run["iterations"], run["train_loss"]) == (3, 2.0)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_plot_has_the_format_of_its_name(runs: Path, suffix: str, magic: bytes) -> None:
    file = runs / f"loss{suffix}"
    done = compare(runs / "plain", runs / "wide", "--names", "one", "two", "--plot", file)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(magic)
    assert "one" in done.stdout
    assert [path.name for path in runs.iterdir() if path.is_file()] == [file.name], "a partial file was left behind"


def test_bad_folders_and_flags_are_one_line_errors(runs: Path) -> None:
    (runs / "empty").mkdir()
    (runs / "no-loss").mkdir()
    with SummaryWriter(str(runs / "no-loss")) as writer:
        writer.add_scalar("other", 1.0, 1)
    (runs / "foreign").mkdir()
    with SummaryWriter(str(runs / "foreign")) as writer:
        writer.add_scalar("lm loss", 1.0, 1)
    for arguments, wanted in (
        ((runs / "nowhere",), "no such folder"),
        ((runs / "empty",), "holds no TensorBoard files"),
        ((runs / "no-loss",), "holds no step with a loss"),
        ((runs / "foreign",), "holds no usable global_batch_size"),
        ((runs / "plain", "--names", "a", "b"), "2 names for 1 runs"),
        ((runs / "plain", "--plot", "loss.jpg"), "must end in .png"),
        ((runs / "plain", "--tail", "0"), "at least 1"),
    ):
        done = compare(*arguments)
        assert done.returncode == 2, f"{arguments}: exit status {done.returncode}\n{done.stderr}"
        last = done.stderr.strip().splitlines()[-1]
        assert wanted in last, f"{arguments}: {done.stderr}"
        assert "Traceback" not in done.stderr


def test_an_error_leaves_existing_files_as_they_are(runs: Path) -> None:
    file = runs / "r.json"
    file.write_text("before")
    assert compare(runs / "plain", runs / "nowhere", "--json", file).returncode == 2
    assert file.read_text() == "before"
