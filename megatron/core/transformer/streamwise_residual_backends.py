"""Which kernels run the streamwise operators: one dispatcher, decided by device and by one environment variable.

    MEGATRON_STREAMWISE_BACKEND=auto|eager python pretrain_gpt.py ...

`auto` (the default) takes the fastest kernels that need no compiler on the device at hand. A backend is four functions
(StreamwiseKernels); streamwise_residual_ops asks for them once per call, in the forward, and its backward uses the same
ones. The choice never depends on grad mode, on requires_grad or on shapes. It is logged once per device.

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "MEGATRON_STREAMWISE_BACKEND"
BACKENDS = ("auto", "eager")


class StreamwiseKernels(Protocol):
    """What a backend implements. Inputs are contiguous; factors have the dtype in which sums are accumulated."""

    def read_forward(self, x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype) -> Tensor:
        """z_nd = sum_k f_k X_k."""

    def read_backward(
        self, grad_z_nd: Tensor, x_nkd: Tensor | None, factor_k: Tensor, x_dtype: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(f_k gZ in x_dtype, sum_nd X_k gZ); an entry is None where x_dtype or x_nkd is None."""

    def write_forward(self, x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
        """y_nkd = g_k X_k + w_k u in the dtype of X."""

    def write_backward(
        self,
        grad_y_nkd: Tensor,
        x_nkd: Tensor | None,
        u_nd: Tensor | None,
        factor_k: Tensor,
        retention_k: Tensor | None,
        u_dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(g_k gY_k, sum_k w_k gY_k in u_dtype, sum_nd u gY_k, sum_nd X_k gY_k).

        An entry is None where retention_k, u_dtype, u_nd or x_nkd, in this order, is None.
        """


def streamwise_kernels(device: torch.device) -> StreamwiseKernels:
    """The kernels for tensors on `device`, by MEGATRON_STREAMWISE_BACKEND. ValueError for an unknown name."""
    return _load(os.environ.get(BACKEND_VARIABLE, "auto"), device.type)


@cache
def _load(name: str, device_type: str) -> StreamwiseKernels:
    if name not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {name!r}.")
    from megatron.core.transformer import streamwise_residual_kernels

    logger.info("Streamwise residual operators on %s: eager kernels.", device_type)
    return streamwise_residual_kernels
