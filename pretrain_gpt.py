"""Pretrain a GPT with upstream's trainer, on GPUs or on a CPU.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ...

All of upstream's options hold, `--wide-residual K` and its kin come on top; docs/train.md shows complete commands.
Without a GPU (or with MEGATRON_DEVICE=cpu) the same command trains on the CPU.
"""

from __future__ import annotations

import sys
import warnings

if __name__ == "__main__":
    # Said in one line of the log (defaults for this machine) rather than by every upstream module that is imported.
    warnings.filterwarnings(
        "ignore", message="(Transformer Engine and )?Apex (is|are) not|Only transformer-engine|Could not determine rank"
    )
    try:
        import megatron  # noqa: F401  # refuses an unsuitable Python or megatron-core in one sentence
    except ImportError as error:
        sys.exit(f"error: {error}")
    from megatron.training.pretrain_entry import gpt_model_config, main

    sys.exit(main(gpt_model_config))
