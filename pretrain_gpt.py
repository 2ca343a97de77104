"""Pretrain a GPT with upstream's trainer, on GPUs or on a CPU.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ...

All of upstream's options hold; docs/train.md shows complete commands. Without a GPU (or with MEGATRON_DEVICE=cpu) the
same command trains on the CPU.
"""

from __future__ import annotations

import sys

from megatron.training.pretrain_entry import gpt_model_config, main

if __name__ == "__main__":
    sys.exit(main(gpt_model_config))
