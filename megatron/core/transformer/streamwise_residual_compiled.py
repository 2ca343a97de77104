"""The streamwise operators through compiled CPU kernels, streamwise_residual_cpu.cpp.

    operators = CompiledOperators(load_library())          # streamwise_residual_library builds it at first use
    z = operators.read_forward(x, Controller(read_logits_p, 4, "read", torch.float32), torch.bfloat16)

Chosen by streamwise_residual_backends for CPU tensors. A call hands pointers to one function of the library, which
forms the factors, goes over the streams once and makes the gradients of controllers and norms.

What always holds: results are the same bits for any number of threads. Pairs of dtypes that the source does not
instantiate (those with fp16) run on the eager kernels.

Tensor names: n tokens, k streams, d branch width, p padded controller; x and y have shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_norm import NormCall
from megatron.core.transformer.streamwise_residual_protocol import (
    StreamwiseUpdate,
    WriteGradients,
    WriteReadGradients,
)
from megatron.core.transformer.streamwise_residual_structures import CompiledController, CompiledNorm

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float64: "double"}
_POINTERS = {  # arguments of each function behind n, k, d and the number of threads
    "read_forward": 4,
    "read_backward": 6,
    "write_backward": 9,
    "write_read_forward": 9,
    "write_read_backward": 12,
}
_Pointers = Callable[..., None]


class CompiledOperators:
    """StreamwiseOperators (streamwise_residual_protocol) for CPU tensors, through the library."""

    name = "compiled"
    fuses_dropout = False
    max_streams: int | None = None

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._function = cache(self._find)
        self._eager = FactorOperators("eager", streamwise_residual_kernels)

    def _find(self, name: str, x: torch.dtype, u: torch.dtype, sums: torch.dtype) -> _Pointers | None:
        """The library's function for these dtypes of stream, branch and sums; None where it has none."""
        symbol = f"{name}_{_NAMES.get(x)}_{_NAMES.get(u)}"
        wanted = torch.float64 if torch.float64 in (x, u) else torch.float32
        if sums is not wanted or not hasattr(self._library, symbol):
            return None
        function = self._library[symbol]
        function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int] + [ctypes.c_void_p] * _POINTERS[name]
        function.restype = None
        return function

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        one = "in one pass"
        return {
            "read": self.name,
            "write": self.name,
            **dict.fromkeys(("write and read", "read and norm", "bias and write"), one),
            "dropout": "PyTorch",
        }

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        del width  # a row of any width stays in cache
        return self._function("read_forward", stream_dtype, branch_dtype, sum_dtype) is not None

    def fuses_bias(self, stream_dtype: torch.dtype, branch_dtype: torch.dtype) -> bool:
        sums = torch.float64 if torch.float64 in (stream_dtype, branch_dtype) else torch.float32
        is_as_wide = torch.promote_types(stream_dtype, branch_dtype) is stream_dtype
        return is_as_wide and self._function("write_backward", stream_dtype, branch_dtype, sums) is not None

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype, norm: NormCall | None = None) -> Tensor:
        call = self._function("read_forward", x.dtype, z_dtype, read.sum_dtype)
        if call is None:
            assert norm is None
            return self._eager.read_forward(x, read, z_dtype)
        x = x.contiguous()
        n, k, d = _sizes(x, read)
        z = torch.empty((*x.shape[:-1], d), dtype=z_dtype)
        f, normed = CompiledController(read), None if norm is None else CompiledNorm.forward(norm, n)
        call(n, k, d, torch.get_num_threads(), *_pointers(x, f, z, normed))
        return z

    def read_backward(
        self,
        grad_z: Tensor,
        x: Tensor | None,
        read: Controller,
        x_dtype: torch.dtype,
        *,
        wants_grad_x: bool,
        through: Tensor | None = None,
        norm: NormCall | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        call = self._function("read_backward", x_dtype, grad_z.dtype, read.sum_dtype)
        if call is None:
            assert norm is None
            return self._eager.read_backward(grad_z, x, read, x_dtype, wants_grad_x=wants_grad_x, through=through)
        grad_z = grad_z.contiguous()
        k, d = read.num_streams, grad_z.shape[-1]
        shape = (*grad_z.shape[:-1], k * d)
        x, through = _contiguous(x), _contiguous(through)
        grad_x = torch.empty(shape, dtype=x_dtype) if wants_grad_x else None
        f = CompiledController(read, wants_gradient=x is not None)
        normed = None if norm is None else CompiledNorm.backward(norm)
        pointers = _pointers(grad_z, x, f, through, grad_x, normed)
        call(grad_z.numel() // d, k, d, torch.get_num_threads(), *pointers)
        return grad_x, f.gradient

    def write_forward(
        self, x: Tensor, update: StreamwiseUpdate, write: Controller, retention: Controller | None
    ) -> Tensor:
        call = self._function("write_read_forward", x.dtype, update.dtype, write.sum_dtype)
        if call is None:
            return self._eager.write_forward(x, update, write, retention)
        x, u, bias_d = x.contiguous(), update.tensor().contiguous(), _contiguous(update.bias_d)
        y = torch.empty_like(x)
        w, g = CompiledController(write), _compiled(retention)
        call(*_sizes(x, write), torch.get_num_threads(), *_pointers(x, u, bias_d, w, g, None, y, None, None))
        return y

    def write_backward(
        self,
        grad_y: Tensor,
        x: Tensor | None,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        *,
        wants_grad_x: bool,
        wants_grad_u: bool,
    ) -> WriteGradients:
        call = self._function("write_backward", grad_y.dtype, update.dtype, write.sum_dtype)
        if call is None:
            return self._eager.write_backward(
                grad_y, x, update, write, retention, wants_grad_x=wants_grad_x, wants_grad_u=wants_grad_u
            )
        grad_y, x, u, bias_d = grad_y.contiguous(), _contiguous(x), _contiguous(update.u), _contiguous(update.bias_d)
        n, k, d = _sizes(grad_y, write)
        grad_x = torch.empty_like(grad_y) if wants_grad_x and retention is not None else None
        grad_u = torch.empty((*grad_y.shape[:-1], d), dtype=update.dtype) if wants_grad_u else None
        w = CompiledController(write, wants_gradient=u is not None)
        g = _compiled(retention, wants_gradient=x is not None)
        grad_bias_d = _bias_sums(bias_d, write) if wants_grad_u else None
        pointers = _pointers(grad_y, x, u, bias_d, w, g, grad_x, grad_u, grad_bias_d)
        call(n, k, d, torch.get_num_threads(), *pointers)
        if wants_grad_x and grad_x is None:  # without retention the incoming gradient itself
            grad_x = grad_y
        return WriteGradients(grad_x, grad_u, w.gradient, None if g is None else g.gradient, grad_bias_d)

    def write_read_forward(
        self,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        z_dtype: torch.dtype,
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor]:
        call = self._fused("write_read_forward", x, update, z_dtype, write)
        if call is None:
            y = self.write_forward(x, update, write, retention)
            return y, self.read_forward(y, read, z_dtype, norm)
        x, u, bias_d = x.contiguous(), update.tensor().contiguous(), _contiguous(update.bias_d)
        n, k, d = _sizes(x, write)
        y, z = torch.empty_like(x), torch.empty_like(u)
        w, g, f = CompiledController(write), _compiled(retention), CompiledController(read)
        normed = None if norm is None else CompiledNorm.forward(norm, n)
        call(n, k, d, torch.get_num_threads(), *_pointers(x, u, bias_d, w, g, f, y, z, normed))
        return y, z

    def write_read_backward(
        self,
        grad_y: Tensor,
        grad_z: Tensor,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        norm: NormCall | None = None,
    ) -> WriteReadGradients:
        call = self._fused("write_read_backward", x, update, grad_z.dtype, write)
        if call is None:
            return self._separate_backward(grad_y, grad_z, x, update, write, retention, read, norm)
        grad_y, grad_z, x = grad_y.contiguous(), grad_z.contiguous(), x.contiguous()
        u, bias_d = update.tensor().contiguous(), _contiguous(update.bias_d)
        grad_x, grad_u = torch.empty_like(x), torch.empty_like(u)
        w, g, f = (_compiled(controller, wants_gradient=True) for controller in (write, retention, read))
        normed = None if norm is None else CompiledNorm.backward(norm)
        grad_bias_d = _bias_sums(bias_d, write)
        pointers = _pointers(grad_y, grad_z, x, u, bias_d, w, g, f, grad_x, grad_u, grad_bias_d, normed)
        call(*_sizes(x, write), torch.get_num_threads(), *pointers)
        assert w is not None
        assert w.gradient is not None
        assert f is not None
        assert f.gradient is not None
        grad_retention_p = None if g is None else g.gradient
        return WriteReadGradients(grad_x, grad_u, w.gradient, grad_retention_p, f.gradient, grad_bias_d)

    def _fused(
        self, name: str, x: Tensor, update: StreamwiseUpdate, z_dtype: torch.dtype, write: Controller
    ) -> _Pointers | None:
        """The library's function for a write and read; there is one for update and z of one dtype."""
        return self._function(name, x.dtype, z_dtype, write.sum_dtype) if update.dtype is z_dtype else None

    def _separate_backward(
        self,
        grad_y: Tensor,
        grad_z: Tensor,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        norm: NormCall | None,
    ) -> WriteReadGradients:
        """write_read_backward by the backward of the read and then of the write, for dtypes without a function."""
        y = self.write_forward(x, update, write, retention)
        grad, grad_read_p = self.read_backward(grad_z, y, read, x.dtype, wants_grad_x=True, through=grad_y, norm=norm)
        assert grad is not None
        kept = None if retention is None else x
        found = self.write_backward(grad, kept, update, write, retention, wants_grad_x=True, wants_grad_u=True)
        return WriteReadGradients.of(found, grad_read_p)


def _sizes(x: Tensor, controller: Controller) -> tuple[int, int, int]:
    """(n, K, D) of a wide stream."""
    k, width = controller.num_streams, x.shape[-1]
    return x.numel() // width, k, width // k


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _bias_sums(bias_d: Tensor | None, write: Controller) -> Tensor | None:
    """Room for the gradient of a bias."""
    return None if bias_d is None else torch.empty(bias_d.shape, dtype=write.sum_dtype)


def _compiled(controller: Controller | None, *, wants_gradient: bool = False) -> CompiledController | None:
    return None if controller is None else CompiledController(controller, wants_gradient=wants_gradient)


def _pointers(*arguments: Tensor | CompiledController | CompiledNorm | None) -> Sequence[int | None]:
    return [None if x is None else x.data_ptr() if isinstance(x, Tensor) else x.pointer for x in arguments]
