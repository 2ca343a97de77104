"""Which kernels run the streamwise operators: one dispatcher, decided by device and by one environment variable.

    MEGATRON_STREAMWISE_BACKEND=auto|compiled|eager python pretrain_gpt.py ...

- `compiled`: C++ for CPU tensors, built once per machine (streamwise_residual_compiled); an error where there is none.
- `eager`: PyTorch operations, on any device (streamwise_residual_kernels).
- `auto` (the default): `compiled` on the CPU, or `eager` with one warning that says why where there is no C++ compiler;
  `eager` on other devices.

What a backend implements: streamwise_residual_protocol. The choice never depends on grad mode, on requires_grad or on
shapes. It is logged once per device.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from megatron.core.transformer import streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_compiled import CompiledKernels, CompiledKernelsError, load_library
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "MEGATRON_STREAMWISE_BACKEND"
BACKENDS = ("auto", "compiled", "eager")


def streamwise_operators(device: torch.device) -> StreamwiseOperators:
    """The operators for tensors on `device`, by MEGATRON_STREAMWISE_BACKEND.

    Raises: ValueError for an unknown name or one that does not serve the device, CompiledKernelsError where `compiled`
    was asked for and cannot be had.
    """
    return _load(os.environ.get(BACKEND_VARIABLE) or "auto", device.type)


def streamwise_backend(device: torch.device) -> str:
    """The name of the backend that serves `device`: never "auto". Raises as streamwise_operators does."""
    return streamwise_operators(device).name


@cache
def _load(wanted: str, device_type: str) -> StreamwiseOperators:
    if wanted not in BACKENDS:
        raise ValueError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {wanted!r}.")
    if wanted == "compiled" and device_type != "cpu":
        raise ValueError(
            f"{BACKEND_VARIABLE}=compiled serves CPU tensors, got tensors on {device_type}: use auto or eager."
        )
    chosen = FactorOperators("eager", streamwise_residual_kernels)
    if wanted != "eager" and device_type == "cpu":
        try:
            chosen = FactorOperators("compiled", CompiledKernels(load_library()))
        except CompiledKernelsError as error:
            if wanted == "compiled":
                raise
            logger.warning("Streamwise residual operators run on the slower eager kernels: %s.", error)
    logger.info("Streamwise residual operators on %s: %s kernels.", device_type, chosen.name)
    return chosen
