"""pretrain_mamba.py as users run it: resumed bit for bit after a kill, both names of the pattern, mistakes refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness_pretrain import RESUME_STEPS, TINY_GPT, TINY_HYBRID, assert_resumes_bit_equal, pretrain

SCRIPT = "pretrain_mamba.py"
REPLAY = ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
WIDE = [*TINY_HYBRID, "--wide-residual", "3", "--bf16", "--use-distributed-optimizer", "--attention-dropout", "0.2"]


def test_killed_hybrid_run_resumes_bit_equal(tmp_path: Path) -> None:
    """Other settings resume without a kill in test_exact_resume.py."""
    replay = [*REPLAY, "--residual-stream-recompute-num-layers", "auto"]
    options = [*WIDE, *replay, "--train-iters", str(RESUME_STEPS)]
    assert_resumes_bit_equal(options, tmp_path, kill_after=10, script=SCRIPT)


def test_the_older_name_of_the_pattern_and_prediction_depths_are_taken(tmp_path: Path) -> None:
    options = [*TINY_GPT[2:], "--disable-bias-linear", "--position-embedding-type", "rope", "--train-iters", "2"]
    pattern = ["--hybrid-override-pattern", "M*/M", "--mamba-head-dim", "16", "--mamba-state-dim", "16"]
    run = pretrain([*options, *pattern, "--wide-residual", "2"], tmp_path, script=SCRIPT)
    assert sorted(run.losses) == [1, 2]
    assert "mtp_1 loss" in run.log, "the loss of the prediction depth is not logged"
    assert "Mamba operators: PyTorch" in run.log
    assert "residual: 2 streams of width 64" in run.log


@pytest.mark.parametrize(
    ("script", "options", "reasons"),
    [
        (SCRIPT, [*TINY_GPT, "--hybrid-layer-pattern", "M?"], ["'?' at position 2", "    M?\n     ^"]),
        ("pretrain_gpt.py", [*TINY_GPT, "--hybrid-layer-pattern", "M*"], ["give it to pretrain_mamba.py"]),
    ],
    ids=["bad symbol", "wrong script"],
)
def test_a_pattern_that_cannot_be_used_ends_with_status_2(
    script: str, options: list[str], reasons: list[str], tmp_path: Path
) -> None:
    run = pretrain([*options, "--train-iters", "2"], tmp_path, script=script, expect_status=2)
    assert "Traceback" not in run.log
    for reason in reasons:
        assert reason in run.log
