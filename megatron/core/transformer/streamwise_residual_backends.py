"""Which kernels run the streamwise operators: one dispatcher, decided by device and by one environment variable.

    MEGATRON_STREAMWISE_BACKEND=auto|compiled|eager python pretrain_gpt.py ...

- `compiled`: C++ for CPU tensors, built once per machine (streamwise_residual_compiled); an error where there is none.
- `eager`: PyTorch operations, on any device (streamwise_residual_kernels).
- `auto` (the default): `compiled` on the CPU, or `eager` with one warning that says why where there is no C++ compiler;
  `eager` on other devices.

A backend is four functions (StreamwiseKernels); streamwise_residual_ops asks for them once per call, in the forward,
and its backward uses the same ones. The choice never depends on grad mode, on requires_grad or on shapes. It is logged
once per device.

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_compiled import CompiledKernels, CompiledKernelsError, load_library

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "MEGATRON_STREAMWISE_BACKEND"
BACKENDS = ("auto", "compiled", "eager")


class StreamwiseKernels(Protocol):
    """What a backend implements. Inputs are contiguous; factors have the dtype in which sums are accumulated."""

    def read_forward(self, x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype) -> Tensor:
        """z_nd = sum_k f_k X_k."""

    def read_backward(
        self, grad_z_nd: Tensor, x_nkd: Tensor | None, factor_k: Tensor, x_dtype: torch.dtype, *, wants_grad_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(f_k gZ in x_dtype, sum_nd X_k gZ); the first is None unless wanted, the second where x_nkd is."""

    def write_forward(self, x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
        """y_nkd = g_k X_k + w_k u in the dtype of X."""

    def write_backward(
        self,
        grad_y_nkd: Tensor,
        x_nkd: Tensor | None,
        u_nd: Tensor | None,
        factor_k: Tensor,
        retention_k: Tensor | None,
        u_dtype: torch.dtype,
        *,
        wants_grad_u: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(g_k gY_k, sum_k w_k gY_k in u_dtype, sum_nd u gY_k, sum_nd X_k gY_k).

        An entry is None where retention_k is None, wants_grad_u is False, u_nd or x_nkd is None, in this order. Sums
        over tokens are fp64.
        """


def streamwise_kernels(device: torch.device) -> StreamwiseKernels:
    """The kernels for tensors on `device`, by MEGATRON_STREAMWISE_BACKEND.

    Raises: ValueError for an unknown name or one that does not serve the device, CompiledKernelsError where `compiled`
    was asked for and cannot be had.
    """
    return _load(os.environ.get(BACKEND_VARIABLE) or "auto", device.type)[1]


def streamwise_backend(device: torch.device) -> str:
    """The name of the backend that serves `device`: never "auto". Raises as streamwise_kernels does."""
    return _load(os.environ.get(BACKEND_VARIABLE) or "auto", device.type)[0]


@cache
def _load(wanted: str, device_type: str) -> tuple[str, StreamwiseKernels]:
    if wanted not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {wanted!r}.")
    if wanted == "compiled" and device_type != "cpu":
        raise ValueError(
            f"{BACKEND_VARIABLE}=compiled serves CPU tensors, got tensors on {device_type}: use auto or eager."
        )
    chosen: tuple[str, StreamwiseKernels] = ("eager", streamwise_residual_kernels)
    if wanted != "eager" and device_type == "cpu":
        try:
            chosen = ("compiled", CompiledKernels(load_library()))
        except CompiledKernelsError as error:
            if wanted == "compiled":
                raise
            logger.warning("Streamwise residual operators run on the slower eager kernels: %s.", error)
    logger.info("Streamwise residual operators on %s: %s kernels.", device_type, chosen[0])
    return chosen
