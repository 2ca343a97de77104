"""Pretrain a GPT with upstream's trainer, on GPUs or on a CPU.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ...

All of upstream's options hold, `--wide-residual K` and its kin come on top; docs/train.md shows complete commands.
Without a GPU (or with MEGATRON_DEVICE=cpu) the same command trains on the CPU.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from megatron.launch import pretrain  # refuses an unsuitable Python or megatron-core in one sentence
    except ImportError as error:
        sys.exit(f"error: {error}")
    sys.exit(pretrain("gpt"))
