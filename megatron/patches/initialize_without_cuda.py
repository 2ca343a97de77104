"""`pretrain()` may start on a host without CUDA.

Upstream's `initialize_megatron` takes `allow_no_cuda`, but `pretrain()` calls it without and passes nothing through, so
there is no seam. Installed by the CPU host alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.patches import UpstreamPatch


def _allow_no_cuda(initialize_megatron: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(initialize_megatron, allow_no_cuda=True)


PATCH = UpstreamPatch(
    module="megatron.training.training",
    name="initialize_megatron",
    reason="pretrain() does not pass allow_no_cuda on",
    source_sha256="d9b467adcaed1325932422670da7ee3b374bcd0f07f2f329780b54d41ca829c7",
    make=_allow_no_cuda,
)
