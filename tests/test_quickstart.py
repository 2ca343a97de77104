"""scripts/quickstart.sh: the whole way from a corpus to a comparison, interrupted once on the way."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from harness_scripts import needs_own_venv, readme_commands, run_script, start_script

pytestmark = needs_own_venv

QUICKSTART = "./scripts/quickstart.sh"
ITERATIONS = 8


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart") / "with space"


@pytest.fixture(scope="module")
def variables(run_dir: Path) -> dict[str, str]:
    return {"RUN_DIR": str(run_dir), "TRAIN_ITERS": str(ITERATIONS), "STREAMS": "3", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def interrupted(run_dir: Path, variables: dict[str, str]):
    """The first start, ^C after the ordinary model's first checkpoint: its exit status, stdout and stderr."""
    process = start_script(QUICKSTART, **variables)
    saved = run_dir / "ordinary/checkpoints/latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 600
    while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert saved.exists(), f"no checkpoint was written:\n{out}\n{err}"
    return process.returncode, out, err


@pytest.fixture(scope="module")
def finished(interrupted: tuple[int, str, str], variables: dict[str, str]):
    """The second start, to its end."""
    done = run_script(QUICKSTART, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_readme_shows_this_command() -> None:
    assert QUICKSTART in readme_commands()


def test_an_interrupt_says_how_to_go_on(interrupted: tuple[int, str, str], run_dir: Path) -> None:
    status, _, err = interrupted
    assert status == 130
    assert "start it again" in err
    assert not (run_dir / "ordinary/finished").exists()


def test_a_second_start_goes_on_from_the_checkpoint(finished, run_dir: Path) -> None:
    log = (run_dir / "ordinary/train.log").read_text()
    assert "successfully loaded checkpoint" in log
    assert log.count("iteration        1/") == 1, "the training began from the start again"
    assert "tokenizer: " in finished.stdout
    assert "is there" in finished.stdout
    assert "trained with other settings" not in finished.stderr


def test_both_models_are_trained_evaluated_logged_and_saved(finished, run_dir: Path) -> None:
    results = json.loads((run_dir / "results.json").read_text())
    assert [(run["name"], run["num_streams"], run["iterations"]) for run in results] == [
        ("ordinary", 1, ITERATIONS),
        ("wide-3", 3, ITERATIONS),
    ]
    ordinary, wide = results
    assert ordinary["parameters"] == wide["parameters"] > 1_000_000
    assert 0 == ordinary["controller_parameters"] < wide["controller_parameters"]
    for run in results:
        assert 4 < run["validation_loss"] < 8.4, "ln(4096) is 8.3: the model has not begun to learn"
        assert run["tokens_per_second"] > 0
        assert run["peak_memory_bytes"] > 2**28
        folder = run_dir / run["name"]
        assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
        assert list(folder.glob("wandb/offline-run-*")), "no offline wandb run"
        assert f"{run['validation_loss']:.4f}" in finished.stdout
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_two_models_start_equal(finished, run_dir: Path) -> None:
    first = []
    for name in ("ordinary", "wide-3"):
        log = (run_dir / name / "train.log").read_text()
        line = next(line for line in log.splitlines() if f"iteration        1/{ITERATIONS:8d}" in line)
        first.append(float(line.partition("lm loss: ")[2].split()[0]))
    assert first[0] == pytest.approx(first[1], rel=2e-4), "one seed, one model at the start (bf16)"


def test_a_third_start_does_nothing_again(finished, run_dir: Path, variables: dict[str, str]) -> None:
    logs = {path: path.stat().st_mtime_ns for path in run_dir.glob("*/train.log")}
    done = run_script(QUICKSTART, **variables)
    assert done.returncode == 0, done.stderr
    assert len(logs) == 2
    assert logs == {path: path.stat().st_mtime_ns for path in run_dir.glob("*/train.log")}
    assert done.stdout.count("is finished") == 2
    table = finished.stdout.partition("results\n")[2]
    assert table
    assert table in done.stdout


def test_other_settings_are_not_mixed_in(finished, run_dir: Path, variables: dict[str, str]) -> None:
    before = (run_dir / "results.json").read_bytes()
    done = run_script(QUICKSTART, **variables | {"TRAIN_ITERS": str(ITERATIONS + 1)})
    assert done.returncode == 2
    assert "trained with other settings" in done.stderr
    assert (run_dir / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"), [("TRAIN_ITERS", "many"), ("TRAIN_ITERS", "0"), ("STREAMS", "1"), ("MODEL", "rnn")]
)
def test_bad_variables_are_refused_before_anything_is_done(tmp_path: Path, name: str, value: str) -> None:
    done = run_script(QUICKSTART, **{"RUN_DIR": str(tmp_path / "new"), name: value})
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name}={value}" in done.stderr
    assert not (tmp_path / "new").exists()
