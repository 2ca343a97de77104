"""Adam and AdamW of the CPU host: PyTorch's, in one pass over each parameter instead of some ten.

Installed by host.cpu_host(): inside it `torch.optim.Adam` and `torch.optim.AdamW` are these classes, so the unmodified
trainer builds them. The arithmetic is PyTorch's own (`fused=True`), and so are state and checkpoints.

What always holds: a step is the same bits for any number of threads; an optimizer that loads a checkpoint of another
implementation stays fused.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.cpu.replacements import Replacements


class Adam(torch.optim.Adam):
    """torch.optim.Adam, fused unless told otherwise."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **{"fused": True, **options})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # not as the checkpoint says that was loaded
            group["fused"] = self.defaults["fused"]


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, fused unless told otherwise; an Adam, as PyTorch's is."""


def install_optimizers(replaced: Replacements) -> None:
    """Let what builds PyTorch's Adam build the fused one."""
    replaced.set(torch.optim, "Adam", Adam)
    replaced.set(torch.optim, "AdamW", AdamW)
