"""Replay without a C++ compiler: the same bits by copies, and one warning that says why and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TRAIN = [
    *("--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "0.01"),
    *("--train-iters", "3", "--mock-data", "--tokenizer-type", "ByteLevelTokenizer", "--eval-iters", "0"),
    *("--log-interval", "1", "--wide-residual", "3", "--wide-residual-learned-retention"),
]
REPLAY = [
    *("--recompute-granularity", "selective", "--recompute-modules", "residual_stream"),
    *("--residual-stream-recompute-num-layers", "2"),
]


def _losses_and_output(arguments: list[str], extensions: Path) -> tuple[list[str], str]:
    """What a run prints of its losses, and all that it prints, where no C++ compiler can be found."""
    environment = os.environ | {"CXX": "/absent/c++", "TORCH_EXTENSIONS_DIR": str(extensions), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    steps = [line for line in printed.splitlines() if "lm loss: " in line and "iteration " in line]
    return [line.split("lm loss: ")[1].split("loss scale")[0] + line.split("grad norm: ")[1] for line in steps], printed


def test_replay_without_a_compiler_gives_the_same_bits_and_says_so(tmp_path: Path) -> None:
    eager, _ = _losses_and_output(TRAIN, tmp_path / "extensions")
    replayed, printed = _losses_and_output(TRAIN + REPLAY, tmp_path / "extensions")
    assert len(eager) == 3
    assert replayed == eager
    said = [line for line in printed.splitlines() if "Replayed outputs are copied" in line]
    assert len(said) == 1, printed[-3000:]
    assert "/absent/c++" in said[0]
    assert "Install a C++ compiler" in said[0]
