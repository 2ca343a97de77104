"""Gives replayed outputs their storages back: by megatron-core's C++ extension or, where that is not built, copies.

    prepare_storage_sharing()            # before the first output is freed; once per process

megatron-core points a freed storage at what the replay computed by an extension of a few lines that PyTorch builds at
first use (some 30 s, kept under ~/.cache/torch_extensions) and needs a C++ compiler for. Built here, before the first
backward, a failure is known while nothing depends on it yet.

What always holds: the values are the same bits either way. A copy holds what it copies twice until the block's
backward is over; one warning says so, with the reason.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron.core.tensor_parallel import random as engine

logger = logging.getLogger(__name__)

_WORTH_A_LINE_S = 5.0


@cache
def prepare_storage_sharing() -> None:
    """Build or load the engine's extension, or put copies in its place."""
    start = time.perf_counter()
    try:
        engine._get_share_storage()
    except (RuntimeError, OSError, ImportError) as error:
        reason = next((line for line in str(error).splitlines() if "not found" in line or "error:" in line), error)
        logger.warning(
            "Replayed outputs are copied, which holds each of them twice while its block is in the backward: "
            "megatron-core's share_storage cannot be built (%s). Install a C++ compiler, or point CXX at one.",
            str(reason).strip(),
        )
        engine._share_storage_ext = SimpleNamespace(share_storage=_copy_storage)
        return
    took_s = time.perf_counter() - start
    if took_s > _WORTH_A_LINE_S:
        logger.info("Built megatron-core's share_storage for the replay in %.0f s.", took_s)


def _copy_storage(freed: Tensor, replayed: Tensor) -> None:
    """Fill a freed storage; below tensors, so that no version counter moves."""
    source = replayed.untyped_storage()
    storage = freed.untyped_storage()
    storage.resize_(source.nbytes())
    with torch.no_grad():
        storage.copy_(source)
