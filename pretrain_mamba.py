"""Pretrain a hybrid of Mamba, attention, MLP and MoE layers with upstream's trainer, on GPUs or on a CPU.

    python pretrain_mamba.py --hybrid-layer-pattern "M*-ME-" --wide-residual 4 ...
    torchrun --nproc-per-node 2 pretrain_mamba.py --hybrid-layer-pattern "M*-|M*-" --pipeline-model-parallel-size 2 ...

One symbol a layer: M Mamba-2, * attention, - MLP, E MoE; docs/hybrid.md has the others and complete commands. All of
upstream's options hold. Without a GPU (or with MEGATRON_DEVICE=cpu) the same command trains on the CPU, and without
mamba-ssm with PyTorch operators.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from megatron.launch import pretrain  # refuses an unsuitable Python or megatron-core in one sentence
    except ImportError as error:
        sys.exit(f"error: {error}")
    sys.exit(pretrain("hybrid"))
