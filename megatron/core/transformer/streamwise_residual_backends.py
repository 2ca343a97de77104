"""Which kernels run the streamwise operators: one dispatcher, decided by device and by one environment variable.

    MEGATRON_STREAMWISE_BACKEND=auto|triton|compiled|eager python pretrain_gpt.py ...

- `triton`: kernels for CUDA tensors (megatron.core.fusions.streamwise_triton_operators); for CPU tensors only through
  Triton's interpreter, that is under TRITON_INTERPRET=1, for tests; an error otherwise.
- `compiled`: C++ for CPU tensors, built once per machine (streamwise_residual_compiled); an error where there is none.
- `eager`: PyTorch operations, on any device (streamwise_residual_kernels).
- `auto` (the default): `triton` on CUDA, `compiled` on the CPU, `eager` elsewhere; where the faster one cannot be had,
  `eager` with one warning that says why.

What a backend implements: streamwise_residual_protocol. The choice never depends on grad mode, on requires_grad or on
shapes. It is logged once per device, with the path of every operator.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from megatron.core.transformer import streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_autograd import AutogradOperators
from megatron.core.transformer.streamwise_residual_compiled import CompiledOperators
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_library import CompiledKernelsError, load_library
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators

logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "MEGATRON_STREAMWISE_BACKEND"
BACKENDS = ("auto", "triton", "compiled", "eager")

_FASTEST = {"cpu": "compiled", "cuda": "triton"}
"""What `auto` takes on a device; `eager` on others."""


class StreamwiseBackendError(ValueError):
    """The backend that was asked for cannot serve; the message says why and what to do."""


def streamwise_operators(device: torch.device) -> StreamwiseOperators:
    """The operators for tensors on `device`, by MEGATRON_STREAMWISE_BACKEND.

    Raises: StreamwiseBackendError (a ValueError) for an unknown name or a backend that cannot serve the device.
    """
    return _load(os.environ.get(BACKEND_VARIABLE) or "auto", device.type, _triton_interpreted())


def streamwise_backend(device: torch.device) -> str:
    """The name of the backend that serves `device`: never "auto". Raises as streamwise_operators does."""
    return streamwise_operators(device).name


def _triton_interpreted() -> bool:
    """Whether Triton's interpreter is asked for, by Triton's own variable."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@cache
def _load(wanted: str, device_type: str, interpreted: bool) -> StreamwiseOperators:
    """The operators for what is asked; every input is a parameter, so that a changed environment is another answer."""
    if wanted not in BACKENDS:
        raise StreamwiseBackendError(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {wanted!r}.")
    fastest = _FASTEST.get(device_type, "eager")
    try:
        operators = _make(fastest if wanted == "auto" else wanted, device_type, interpreted)
    except StreamwiseBackendError as error:
        if wanted != "auto":
            raise
        logger.warning(
            "Streamwise residual operators run on the slower eager kernels, not on the %s ones: %s", fastest, error
        )
        operators = _make("eager", device_type, interpreted)
    logger.info("Streamwise residual operators on %s: %s.", device_type, _describe(operators))
    return operators


def describe_backend(device: torch.device) -> str:
    """One line about what runs the operators on `device`, as it is logged: "compiled kernels (read compiled, ...)"."""
    return _describe(streamwise_operators(device))


def _describe(operators: StreamwiseOperators) -> str:
    paths = ", ".join(f"{operator} {path}" for operator, path in operators.paths().items())
    return f"{operators.name} kernels ({paths})"


def _make(name: str, device_type: str, interpreted: bool) -> StreamwiseOperators:
    """The backend `name` for tensors on a device of this type; StreamwiseBackendError where it cannot be had."""
    if name == "triton":
        return _make_triton(device_type, interpreted)
    if name == "eager":
        return AutogradOperators(FactorOperators("eager", streamwise_residual_kernels))
    if device_type != "cpu":
        raise StreamwiseBackendError(
            f"{BACKEND_VARIABLE}=compiled serves CPU tensors, got tensors on {device_type}: use auto, triton or eager."
        )
    try:
        return CompiledOperators(load_library())
    except CompiledKernelsError as error:
        raise StreamwiseBackendError(f"{error}.") from error


def _make_triton(device_type: str, interpreted: bool) -> StreamwiseOperators:
    """The Triton backend."""
    if device_type != "cuda" and not (device_type == "cpu" and interpreted):
        raise StreamwiseBackendError(
            f"{BACKEND_VARIABLE}=triton serves CUDA tensors, got {device_type} ones: use auto, or TRITON_INTERPRET=1 "
            "to run the kernels on CPU tensors through Triton's interpreter, which is slow and made for tests."
        )
    try:
        from megatron.core.fusions.streamwise_triton_operators import TritonOperators
    except ImportError as error:
        raise StreamwiseBackendError(
            f"triton does not import ({error}); install triton, which comes with PyTorch's CUDA wheels."
        ) from error
    return AutogradOperators(TritonOperators())
