"""A run that was killed and started again computes bit for bit what an uninterrupted one does, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_pretrain import RESUME_STEPS, TINY_GPT, Run, assert_resumes_bit_equal, pretrain
from megatron.core.rerun_state_machine import EXIT_CODE_RESUME_TO_DISAMBIGUATE

OPTIONS = [*TINY_GPT, "--train-iters", str(RESUME_STEPS), "--attention-dropout", "0.2"]


@pytest.fixture(scope="module")
def whole_fp32(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run."""
    return pretrain(OPTIONS, tmp_path_factory.mktemp("whole"))


def test_a_killed_fp32_run_resumes_bit_equal_with_dropout(whole_fp32: Run, tmp_path: Path) -> None:
    assert_resumes_bit_equal(OPTIONS, tmp_path, whole=whole_fp32)


def test_dropout_is_at_work_in_these_runs(whole_fp32: Run, tmp_path: Path) -> None:
    """Otherwise the other tests could not see random numbers that went astray."""
    options = [*OPTIONS, "--exit-interval", "1", "--attention-dropout", "0", "--hidden-dropout", "0"]
    assert pretrain(options, tmp_path).losses[1] != whole_fp32.losses[1]


def test_a_run_that_gives_up_on_a_nan_ends_with_its_cause_also_without_save(tmp_path: Path) -> None:
    options = [*TINY_GPT, "--train-iters", "4", "--lr", "1e30", "--clip-grad", "0"]
    run = pretrain(options, tmp_path, expect_status=EXIT_CODE_RESUME_TO_DISAMBIGUATE)
    assert "found a NaN or Inf in the loss" in run.log
    assert "nothing is saved, there is no --save" in run.log
    assert "Traceback" not in run.log
