"""pretrain_gpt.py on wide streams: resumed bit for bit after a kill, layouts guarded on load, bad flags refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness_pretrain import RESUME_STEPS, TINY_GPT, assert_resumes_bit_equal, pretrain

from megatron.training.local_defaults import LocalChoiceError
from megatron.training.pretrain_entry import parse_training_arguments

WIDE = [*TINY_GPT, "--train-iters", str(RESUME_STEPS), "--wide-residual"]
REPLAY = ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
# Other settings resume without a kill in test_exact_resume.py.
OPTIMIZER = ["--use-distributed-optimizer"]
RUNS = {
    "bf16-distributed-optimizer-fp32-residual": [*WIDE, "4", "--bf16", "--fp32-residual-connection", *OPTIMIZER],
    "bf16-distributed-optimizer-plain-format": [*WIDE, "3", "--bf16", *OPTIMIZER, "--ckpt-format", "torch"],
}


def refused(options: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Parse the options as pretrain_gpt.py does on a CPU host, and return why they are refused."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, *options])
    with pytest.raises(LocalChoiceError) as refusal:
        parse_training_arguments("cpu")
    return str(refusal.value)


@pytest.mark.parametrize("name", RUNS)
def test_killed_wide_run_resumes_bit_equal(name: str, tmp_path: Path) -> None:
    assert_resumes_bit_equal(RUNS[name], tmp_path, kill_after=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 streams with retention after 2 steps."""
    folder = tmp_path_factory.mktemp("layout")
    options = [*TINY_GPT, "--wide-residual", "4", "--wide-residual-learned-retention", "--train-iters", "3"]
    run = pretrain([*options, "--save", "checkpoints", "--save-interval", "2", "--exit-interval", "2"], folder)
    controllers = 4 * (2 * 2 * 3 + 1)
    assert f"+ {controllers:,} controllers" in run.log, "the summary does not count the controllers"
    assert "residual: 4 streams of width 64 (256 carried" in run.log
    return folder / "checkpoints"


def test_use_checkpoint_args_restores_the_stream_layout(checkpoint: Path, tmp_path: Path) -> None:
    # A flag that says what the checkpoint has by default is no contradiction.
    same = ["--wide-residual-streamwise-sigmoid-init-scale", "0.01"]
    options = [*TINY_GPT, *same, "--train-iters", "3", "--load", str(checkpoint), "--use-checkpoint-args"]
    run = pretrain(options, tmp_path)
    assert "residual: 4 streams" in run.log
    assert sorted(run.losses) == [3]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "has 4 streams"),
        (["--wide-residual", "3", "--wide-residual-learned-retention"], "this run asks for 3 streams"),
        (["--wide-residual", "4"], "this run asks for 4 streams, write spread 0.01 at the start, no retention"),
        (["--wide-residual", "3", "--use-checkpoint-args"], "--wide-residual is 3 on the command line and 4 in the"),
    ],
    ids=["ordinary", "other-count", "no-retention", "contradiction"],
)
def test_checkpoint_of_another_layout_is_refused(
    checkpoint: Path, flags: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = refused([*flags, "--train-iters", "3", "--load", str(checkpoint)], monkeypatch)
    assert reason in refusal


def test_refused_checkpoint_ends_the_run_with_status_2_and_one_line(checkpoint: Path, tmp_path: Path) -> None:
    run = pretrain([*TINY_GPT, "--train-iters", "3", "--load", str(checkpoint)], tmp_path, expect_status=2)
    assert "error: the checkpoint in" in run.log, run.log[-2000:]
    assert "has 4 streams" in run.log
    assert "Traceback" not in run.log


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--wide-residual-learned-retention"], "--wide-residual-learned-retention given without --wide-residual"),
        (["--wide-residual", "4", "--residual-stream-recompute-num-layers", "2"], "without residual_stream among"),
        (REPLAY, "needs wide residual streams"),
        (["--wide-residual", "4", "--recompute-modules", "residual_stream"], "needs --recompute-granularity selective"),
        (["--wide-residual", "4", "--num-experts", "4"], "needs --disable-bias-linear"),
        (["--wide-residual", "4", "--save", "checkpoints"], "--save needs --save-interval"),
        (["--bf16", "--fp32-residual-connection"], "--fp32-residual-connection with --bf16 needs transformer-engine"),
        (["--mtp-num-layers", "1"], "--position-embedding-type learned_absolute: give rope or none"),
        (
            ["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--pipeline-model-parallel-size", "2"],
            "give --untie-embeddings-and-output-weights",
        ),
        (
            ["--wide-residual", "4", "--wide-residual-streamwise-sigmoid-init-scale", "-1"],
            "--wide-residual-streamwise-sigmoid-init-scale is -1.0",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_flags_that_cannot_work_are_refused(flags: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason in refused([*flags, "--train-iters", "1"], monkeypatch)


def test_training_with_replay_is_bit_equal_to_training_without(tmp_path: Path) -> None:
    options = [*TINY_GPT, "--train-iters", "30", "--wide-residual", "4"]
    without = pretrain(options, tmp_path)
    replayed = pretrain([*options, *REPLAY, "--residual-stream-recompute-num-layers", "1"], tmp_path)
    assert len(without.losses) == 30
    assert replayed.losses == without.losses
