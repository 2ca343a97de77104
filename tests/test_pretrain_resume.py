"""A run that was killed and started again computes bit for bit what an uninterrupted one does, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_pretrain import TINY_GPT, Run, pretrain, pretrain_killed_after

STEPS, KILLED_AFTER, SAVE_INTERVAL = 20, 7, 5
OPTIONS = [*TINY_GPT, "--train-iters", str(STEPS), "--attention-dropout", "0.2"]


@pytest.fixture(scope="module")
def whole_fp32(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run."""
    return pretrain(OPTIONS, tmp_path_factory.mktemp("whole"))


def _assert_resumes_bit_equal(whole: Run, options: list[str], folder: Path) -> None:
    assert sorted(whole.losses) == list(range(1, STEPS + 1)), "not every step's loss was written"
    saving = [*options, "--save", "checkpoints", "--load", "checkpoints", "--save-interval", str(SAVE_INTERVAL)]
    killed = pretrain_killed_after(KILLED_AFTER, saving, folder)
    assert STEPS not in killed.logged_steps, "the run had ended before it could be killed"
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved in range(SAVE_INTERVAL, STEPS, SAVE_INTERVAL), f"nothing useful was saved: {saved}"
    resumed = pretrain(saving, folder)
    expected = {step: loss for step, loss in whole.losses.items() if step > saved}
    assert resumed.losses == expected, "the resumed run's losses are not those of the uninterrupted run"


def test_a_killed_fp32_run_resumes_bit_equal_with_dropout(whole_fp32: Run, tmp_path: Path) -> None:
    _assert_resumes_bit_equal(whole_fp32, OPTIONS, tmp_path)


def test_a_killed_bf16_run_resumes_bit_equal_with_dropout(tmp_path: Path) -> None:
    options = [*OPTIONS, "--bf16", "--use-distributed-optimizer"]
    _assert_resumes_bit_equal(pretrain(options, tmp_path), options, tmp_path)


def test_dropout_is_at_work_in_these_runs(whole_fp32: Run, tmp_path: Path) -> None:
    """Otherwise the other tests could not see random numbers that went astray."""
    options = [*OPTIONS, "--exit-interval", "1", "--attention-dropout", "0", "--hidden-dropout", "0"]
    assert pretrain(options, tmp_path).losses[1] != whole_fp32.losses[1]
