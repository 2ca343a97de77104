"""MODEL=hybrid scripts/quickstart.sh: a hybrid of every kind of layer learns more than the frequencies of tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

from harness_scripts import needs_own_venv, run_script

pytestmark = needs_own_venv

ITERATIONS = 40


def test_the_hybrid_quickstart_learns_more_than_the_unigram_entropy(tmp_path: Path) -> None:
    variables = {"MODEL": "hybrid", "RUN_DIR": str(tmp_path), "TRAIN_ITERS": str(ITERATIONS), "OMP_NUM_THREADS": "1"}
    done = run_script("./scripts/quickstart.sh", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    for run in json.loads((tmp_path / "results.json").read_text()):
        log = (tmp_path / run["name"] / "train.log").read_text()
        entropy = re.search(r"unigram entropy of the training corpus: ([0-9.]+) nats", log)
        assert entropy is not None, "the run does not print the entropy of its corpus"
        assert 5.5 < float(entropy.group(1)) < 8.3, "not the entropy of a text of 4096 tokens"
        assert run["validation_loss"] < float(entropy.group(1)), f"{run['name']} has learned no context"
        assert "Mamba operators: " in log
