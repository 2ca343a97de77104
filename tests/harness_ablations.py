"""Ablations for tests: a base recipe, and a YAML on top of it.

    ablation = ablation_of(folder, WIDE)          # folder/trial.yaml above folder/base.yaml

What always holds: nothing is launched; run folders lie below `root`.
"""

from __future__ import annotations

from pathlib import Path

from megatron.ablations.description import Ablation, load_ablation

ROOT = Path(__file__).resolve().parents[1]
BASE = """script: pretrain_gpt.py
flags: {num-layers: 2, hidden-size: 64, ffn-hidden-size: 192, num-attention-heads: 4, seq-length: 32, lr: 1e-3,
        min-lr: 1e-4, global-batch-size: 8, train-iters: 10, swiglu: true}
"""
WIDE = "base: base.yaml\naxes: [{streams: 1}, {streams: [2, 4], retention: [false, true]}]\nseeds: [1, 2]\n"


def ablation_of(folder: Path, text: str, root: Path = ROOT, name: str = "trial.yaml") -> Ablation:
    """Write and load it."""
    (folder / "base.yaml").write_text(BASE)
    (folder / name).write_text(text)
    return load_ablation(folder / name, root)
