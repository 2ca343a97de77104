"""Controllers and norms as the compiled CPU kernels take them: `Controller` and `Norm` of the C++ headers.

    with_read = CompiledController(read, wants_gradient=True)
    with_norm = CompiledNorm.forward(call, n)        # allocates the statistics that the kernel writes
    library_function(..., with_read.pointer, with_norm.pointer)
    with_read.gradient                               # [p], or None where none was wanted

Used by streamwise_residual_compiled. What always holds: the layouts are those of streamwise_residual_controllers.h and
streamwise_residual_norm.h, and what a structure points to lives as long as its owner here.

Tensor names: n tokens, d branch width, p padded controller.
"""

from __future__ import annotations

import ctypes

import torch

from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall

_CPU = torch.device("cpu")
_KINDS = {"factor": 0, "read": 1, "write": 2, "retention": 3}


class _Controller(ctypes.Structure):
    """`Controller` of streamwise_residual_controllers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "gradient")),
        *((name, ctypes.c_int64) for name in ("length", "is_double", "kind")),
        ("max_forget", ctypes.c_double),
    )


class _Norm(ctypes.Structure):
    """`Norm` of streamwise_residual_norm.h."""

    _fields_ = (
        ("is_layer_norm", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "mean", "scale", "grad_weight", "grad_bias")),
    )


class CompiledController:
    """One Controller in one call of a kernel, with the gradient that the kernel gives it."""

    def __init__(self, controller: Controller, *, wants_gradient: bool = False) -> None:
        self._values = values = controller.values_p.contiguous()
        self.gradient = torch.empty_like(values) if wants_gradient else None
        self._structure = _Controller(
            values.data_ptr(),
            None if self.gradient is None else self.gradient.data_ptr(),
            values.shape[0],
            values.dtype is torch.float64,
            _KINDS[controller.kind],
            controller.max_forget,
        )
        self.pointer = ctypes.addressof(self._structure)


class CompiledNorm:
    """One NormCall in one call of a kernel."""

    def __init__(self, call: NormCall) -> None:
        self._tensors = (
            *(call.weight(_CPU), call.bias(_CPU), call.mean_n, call.scale_n),
            *(call.grad_weight_d, call.grad_bias_d),
        )
        pointers = [None if x is None else x.data_ptr() for x in self._tensors]
        self._structure = _Norm(call.is_layer_norm, call.norm.eps, *pointers)
        self.pointer = ctypes.addressof(self._structure)

    @classmethod
    def forward(cls, call: NormCall, n: int) -> CompiledNorm:
        """For a forward of n tokens, whose statistics the call keeps."""
        call.allocate_statistics(n, _CPU)
        return cls(call)

    @classmethod
    def backward(cls, call: NormCall) -> CompiledNorm:
        """For a backward, whose gradients the call gets."""
        call.grad_weight_d = torch.empty(call.norm.width, dtype=call.sum_dtype)
        call.grad_bias_d = torch.empty_like(call.grad_weight_d) if call.is_layer_norm else None
        return cls(call)
