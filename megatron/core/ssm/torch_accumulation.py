"""In which dtype the PyTorch operators of Mamba-2 make their sums.

    wide = accumulation_dtype(x.dtype)

What always holds: fp32 or wider; an operator converts its inputs to it and rounds once, where it stores a result.
"""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of `dtype` are made: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
