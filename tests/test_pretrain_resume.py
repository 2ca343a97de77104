"""A run that was killed and started again computes bit for bit what an uninterrupted one does, dropout included."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_pretrain import TINY_GPT, pretrain, pretrain_killed_after

STEPS, KILLED_AFTER, SAVED = 20, 7, 5


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_a_killed_run_resumes_bit_equal_with_dropout(tmp_path: Path, precision: list[str]) -> None:
    options = [*TINY_GPT, *precision, "--train-iters", str(STEPS), "--attention-dropout", "0.2"]
    whole = pretrain(options, tmp_path)
    assert sorted(whole.losses) == list(range(1, STEPS + 1)), "not every step's loss was written"

    saving = [*options, "--save", "checkpoints", "--load", "checkpoints", "--save-interval", str(SAVED)]
    killed = pretrain_killed_after(KILLED_AFTER, saving, tmp_path)
    assert STEPS not in killed.logged_steps, "the run had ended before it could be killed"
    saved = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved in range(SAVED, STEPS, SAVED), f"nothing useful was saved: {saved}"
    resumed = pretrain(saving, tmp_path)

    expected = {step: loss for step, loss in whole.losses.items() if step > saved}
    assert resumed.losses == expected, "the resumed run's losses are not those of the uninterrupted run"


def test_dropout_is_at_work_in_these_runs(tmp_path: Path) -> None:
    """Otherwise the resume test could not see random numbers that went astray: dropout slows the first steps."""
    options = [*TINY_GPT, "--train-iters", "1", "--attention-dropout"]
    losses = [pretrain([*options, rate, "--hidden-dropout", "0"], tmp_path).losses[1] for rate in ("0", "0.2")]
    assert losses[0] != losses[1]
