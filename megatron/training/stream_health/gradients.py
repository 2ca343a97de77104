"""Squared gradient norms of controllers, as every rank's part of the whole.

    GradientParts(ddp_chunks).squared(parameter)      # summed over the ranks of a model replica: |g|^2

Taken after Megatron has reduced the gradients and before the optimizer unscales and clips them. With the distributed
optimizer each data-parallel rank holds its share of a bucket only, and answers for what of the vector lies in it.

What always holds: gradients are read, never changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def _bucket_of(ddp_chunks: Iterable[Any]) -> dict[torch.nn.Parameter, tuple[Any, Any]]:
    """Return (bucket, data-parallel group) of every parameter whose gradient is sharded over that group."""
    found = {}
    for chunk in ddp_chunks:
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
            if not buffer.ddp_config.use_distributed_optimizer:
                continue
            for bucket in buffer.buckets:
                for parameter in bucket.params:
                    found[parameter] = bucket, buffer.data_parallel_group
    return found


class GradientParts:
    """Gradients of the controllers of this rank.

    Args:
        ddp_chunks: the model chunks as the trainer has them, wrapped in DistributedDataParallel.
        copies: ranks of the data-parallel group, context parallelism included.
    """

    def __init__(self, ddp_chunks: Iterable[Any], copies: int) -> None:
        self._bucket_of = _bucket_of(chunk for chunk in ddp_chunks if not callable(getattr(chunk, "buffers", None)))
        self._copies = copies

    def squared(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return this rank's part of the squared norm, fp64 []; the parts of all `copies` ranks sum up to it."""
        gradient_p = getattr(parameter, "main_grad", None)
        if gradient_p is None:
            gradient_p = parameter.grad
        if gradient_p is None:
            return torch.zeros((), dtype=torch.float64, device=parameter.device)
        holders = 1
        if parameter in self._bucket_of:
            bucket, group = self._bucket_of[parameter]
            data = bucket.grad_data
            start = (gradient_p.data_ptr() - data.data_ptr()) // data.element_size()
            share = data.numel() // group.size()
            low = max(start, group.rank() * share) - start
            high = min(start + gradient_p.numel(), (group.rank() + 1) * share) - start
            gradient_p = gradient_p[low : max(low, high)]
            holders = group.size()
        return gradient_p.detach().double().square().sum() * holders / self._copies
