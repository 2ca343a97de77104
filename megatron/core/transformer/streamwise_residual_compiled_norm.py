"""A norm as the compiled CPU kernels take it: the structure `Norm` of streamwise_residual_norm.h.

    with_norm = CompiledNorm.forward(call, n)        # allocates the statistics that the kernel writes
    library_function(..., with_norm.pointer())

Used by streamwise_residual_compiled. What always holds: the structure's layout is that of the header, and the tensors
that it points to live as long as the CompiledNorm.

Tensor names: n tokens, d branch width.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_norm import NormCall

_CPU = torch.device("cpu")


class _Structure(ctypes.Structure):
    """`Norm` of streamwise_residual_norm.h."""

    _fields_ = (
        ("is_layer_norm", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "mean", "scale", "partial")),
        *((name, ctypes.c_void_p) for name in ("grad_weight", "grad_bias")),
    )


class CompiledNorm:
    """One NormCall in one call of a kernel."""

    def __init__(self, call: NormCall, partial: Tensor | None) -> None:
        self._tensors = {
            "weight": call.weight(_CPU),
            "bias": call.bias(_CPU),
            "mean": call.mean_n,
            "scale": call.scale_n,
            "partial": partial,
            "grad_weight": call.grad_weight_d,
            "grad_bias": call.grad_bias_d,
        }
        pointers = {name: None if x is None else x.data_ptr() for name, x in self._tensors.items()}
        self._structure = _Structure(int(call.is_layer_norm), call.norm.eps, *pointers.values())

    @classmethod
    def forward(cls, call: NormCall, n: int) -> CompiledNorm:
        """For a forward of n tokens, whose statistics the call keeps."""
        call.allocate_statistics(n, _CPU)
        return cls(call, None)

    @classmethod
    def backward(cls, call: NormCall, token_blocks: int) -> CompiledNorm:
        """For a backward, whose gradients the call gets."""
        width, sums = call.norm.width, 2 if call.is_layer_norm else 1
        call.grad_weight_d = torch.empty(width, dtype=torch.float64)
        call.grad_bias_d = torch.empty(width, dtype=torch.float64) if call.is_layer_norm else None
        return cls(call, torch.empty((token_blocks, sums, width), dtype=call.sum_dtype))

    def pointer(self) -> int:
        """Its address, valid while this object lives."""
        return ctypes.addressof(self._structure)
