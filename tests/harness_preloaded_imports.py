"""What the fork server of harness_preloaded.py imports, which is what every run of the trainer does; not run by itself.

What always holds: nothing here chooses anything for a run.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.cpu.quick_imports import import_upstream

    import_upstream()
    import megatron.core.tokenizers.text.text_tokenizer
    import torch.utils.tensorboard  # noqa: F401

    import megatron.training.pretrain_entry
    import megatron.training.wide_residual_builders  # noqa: F401
