"""The streamwise operators on Triton kernels.

    operators = TritonOperators()
    y, z = operators.write_read_forward(x, update, write, retention, read, torch.bfloat16)

StreamwiseOperators of megatron.core.transformer.streamwise_residual_protocol, chosen by streamwise_residual_backends
for CUDA tensors, and for CPU tensors under TRITON_INTERPRET=1. What always holds: each operator is one kernel, each
controller's gradient one more; bias and dropout of an update are part of the write; any strides with contiguous rows
are taken as they are, others are made contiguous; K from 1 to 16; nothing waits for the device.

Names: n tokens, k streams, d branch width, p padded controller; a bare x or y has shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions import streamwise_triton_parts as parts
from megatron.core.fusions.streamwise_triton_configs import MANY_ELEMENTS, backward_tile
from megatron.core.fusions.streamwise_triton_read import read_backward, read_forward
from megatron.core.fusions.streamwise_triton_write import write_backward, write_forward
from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseUpdate, WriteGradients, WriteReadGradients

MAX_STREAMS = 16

_KINDS = {
    "factor": parts.FACTOR.value,
    "read": parts.READ.value,
    "write": parts.WRITE.value,
    "retention": parts.RETENTION.value,
}
_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_FINISH_BLOCK, _FOLD_BLOCK = 1024, 4096


class TritonOperators:
    """StreamwiseOperators through Triton."""

    name = "triton"
    fuses_update = True
    max_streams: int | None = MAX_STREAMS

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        return {
            "read": self.name,
            "write": self.name,
            "write and read": "in one pass",
            "bias and dropout": "in the write",
        }

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype) -> Tensor:
        _check_streams(read)
        z = x.new_empty((*x.shape[:-1], x.shape[-1] // read.num_streams), dtype=z_dtype)
        rows = _Rows(z)
        if rows.count:
            read_forward[rows.forward_grid](
                *rows.of(x),
                read.values_p,
                z,
                rows.count,
                rows.inner,
                **rows.shape(read),
                READ_KIND=_KINDS[read.kind],
                MANY=rows.many,
            )
        return z

    def read_backward(
        self, grad_z: Tensor, x: Tensor | None, read: Controller, x_dtype: torch.dtype, *, wants_grad_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = _Rows(grad_z)
        grad_x = None
        if wants_grad_x:
            shape = (*grad_z.shape[:-1], grad_z.shape[-1] * read.num_streams)
            grad_x = grad_z.new_empty(shape, dtype=x_dtype)
        partial = rows.partial(read, 1)
        if rows.count and (wants_grad_x or x is not None):
            read_backward[rows.backward_grid](
                *rows.of(grad_z),
                *rows.of(grad_z if x is None else x),
                read.values_p,
                partial if grad_x is None else grad_x,
                partial,
                rows.count,
                rows.inner,
                rows.tiles,
                **rows.shape(read),
                READ_KIND=_KINDS[read.kind],
                WANTS_X=wants_grad_x,
                WANTS_READ=x is not None,
                **rows.tile,
            )
        return grad_x, None if x is None else _finish(_folded(partial)[0], read)

    def write_forward(
        self, x: Tensor, update: StreamwiseUpdate, write: Controller, retention: Controller | None
    ) -> Tensor:
        return self._write(x, update, write, retention, None, None)[0]

    def write_read_forward(
        self,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        z_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        z = x.new_empty(update.tensor().shape, dtype=z_dtype)
        return self._write(x, update, write, retention, read, z)[0], z

    def _write(
        self,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller | None,
        z: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """(Y, z): z is filled where it is given."""
        _check_streams(write)
        u = update.tensor()
        rows = _Rows(u)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows.count:
            write_forward[rows.forward_grid](
                *rows.of(x),
                *rows.of(u),
                u if update.bias_d is None else update.bias_d.contiguous(),
                u if update.seed is None else update.seed,
                *_values(write, retention, read),
                y,
                y if z is None else z,
                rows.count,
                rows.inner,
                **rows.shape(write),
                **_write_constants(update, write, retention, read),
                MANY=rows.many,
            )
        return y, z

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
        wants_x = wants_grad_x and retention is not None
        grad_x, grad_u, partial = self._write_gradients(
            grad_y, None, x, update, write, retention, None, wants_x=wants_x, wants_u=wants_grad_u
        )
        partial = _folded(partial)
        return WriteGradients(
            grad_y if wants_grad_x and retention is None else grad_x,  # without retention the incoming gradient itself
            grad_u,
            None if update.u is None else _finish(partial[0], write),
            None if x is None or retention is None else _finish(partial[1], retention),
        )

    def write_read_backward(
        self,
        grad_y: Tensor,
        grad_z: Tensor,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
    ) -> WriteReadGradients:
        grad_x, grad_u, partial = self._write_gradients(
            grad_y, grad_z, x, update, write, retention, read, wants_x=True, wants_u=True
        )
        assert grad_x is not None
        assert grad_u is not None
        partial = _folded(partial)
        return WriteReadGradients(
            grad_x,
            grad_u,
            _finish(partial[0], write),
            None if retention is None else _finish(partial[1], retention),
            _finish(partial[2], read),
        )

    def _write_gradients(
        self,
        grad_y: Tensor,
        grad_z: Tensor | None,
        x: Tensor | None,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller | None,
        *,
        wants_x: bool,
        wants_u: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(dX, du, sums [3, K, tiles] of the write's, the retention's and the read's factors)."""
        shape = (*grad_y.shape[:-1], grad_y.shape[-1] // write.num_streams)
        grad_u = torch.empty(shape, dtype=update.dtype, device=grad_y.device) if wants_u else None
        grad_x = torch.empty(grad_y.shape, dtype=grad_y.dtype, device=grad_y.device) if wants_x else None
        rows = _Rows(grad_y, columns=shape[-1])
        partial = rows.partial(write, 3)
        if rows.count:
            narrow = grad_y if update.u is None else update.u
            write_backward[rows.backward_grid](
                *rows.of(grad_y),
                *rows.of(grad_y if grad_z is None else grad_z),
                *rows.of(grad_y if x is None else x),
                *rows.of(narrow),
                narrow if update.bias_d is None else update.bias_d.contiguous(),
                narrow if update.seed is None else update.seed,
                *_values(write, retention, read),
                partial if grad_x is None else grad_x,
                partial if grad_u is None else grad_u,
                partial,
                rows.count,
                rows.inner,
                rows.tiles,
                **rows.shape(write),
                **_write_constants(update, write, retention, read),
                WANTS_X=wants_x,
                WANTS_U=wants_u,
                WANTS_WRITE=update.u is not None,
                WANTS_RETENTION=x is not None and retention is not None,
                **rows.tile,
            )
        return grad_x, grad_u, partial


class _Rows:
    """The rows of one call: how many there are, and how a kernel finds them in each tensor.

    A leading shape of up to two dimensions is [outer, inner] for every tensor, so that any strides will do; a longer
    one is taken as one dimension of contiguous rows.
    """

    def __init__(self, narrow: Tensor, columns: int | None = None) -> None:
        self._leading = narrow.shape[:-1]
        self.columns = narrow.shape[-1] if columns is None else columns
        self.count = math.prod(self._leading)
        self.inner = self._leading[-1] if len(self._leading) == 2 else 1
        self.many = self.count * self.columns >= MANY_ELEMENTS
        self.tile = backward_tile(self.columns)
        self.backward_grid = (
            triton.cdiv(self.count, self.tile["BN"]),
            triton.cdiv(self.columns, self.tile["BD"]),
        )
        self.tiles = self.backward_grid[0] * self.backward_grid[1]

    def forward_grid(self, constants: dict[str, Any]) -> tuple[int, int]:
        """The grid of a forward kernel with the tile in `constants`."""
        return triton.cdiv(self.count, constants["BN"]), triton.cdiv(self.columns, constants["BD"])

    def of(self, x: Tensor) -> tuple[Tensor, int, int]:
        """(tensor, stride of outer, stride of inner)."""
        if x.stride(-1) != 1 or len(self._leading) > 2:
            x = x.contiguous()
        if len(self._leading) == 2:
            return x, x.stride(0), x.stride(1)
        if len(self._leading) == 1:
            return x, x.stride(0), 0
        return x, x.shape[-1], 0

    def shape(self, controller: Controller) -> dict[str, Any]:
        """Constants that every kernel takes."""
        return {"D": self.columns, "K": controller.num_streams, "ACC": _DTYPES[controller.sum_dtype]}

    def partial(self, controller: Controller, controllers: int) -> Tensor:
        """Room for the first level of sums: [controllers, K, tiles]."""
        shape = (controllers, controller.num_streams, self.tiles)
        return torch.empty(shape, dtype=controller.sum_dtype, device=controller.values_p.device)


def _check_streams(controller: Controller) -> None:
    if controller.num_streams > MAX_STREAMS:
        raise ValueError(
            f"the Triton kernels serve up to {MAX_STREAMS} streams, got {controller.num_streams}: set "
            "MEGATRON_STREAMWISE_BACKEND=eager."
        )


def _values(write: Controller, retention: Controller | None, read: Controller | None) -> tuple[Tensor, Tensor, Tensor]:
    """The three vectors of a write; any one stands in for one that is not there and not looked at."""
    return (
        write.values_p,
        write.values_p if retention is None else retention.values_p,
        write.values_p if read is None else read.values_p,
    )


def _write_constants(
    update: StreamwiseUpdate, write: Controller, retention: Controller | None, read: Controller | None
) -> dict[str, Any]:
    """Constants of both write kernels."""
    dropout = update.dropout if update.seed is not None else 0.0
    return {
        "WRITE_KIND": _KINDS[write.kind],
        "RETENTION_KIND": _KINDS["factor" if retention is None else retention.kind],
        "READ_KIND": _KINDS["factor" if read is None else read.kind],
        "MAX_FORGET": 0.0 if retention is None else retention.max_forget,
        "HAS_RETENTION": retention is not None,
        "HAS_READ": read is not None,
        "HAS_BIAS": update.bias_d is not None,
        "THRESHOLD": round(dropout * 2**32),
        "SCALE": 1.0 / (1.0 - dropout) if dropout < 1 else 0.0,
    }


def _folded(partial_ckt: Tensor) -> Tensor:
    """Sums of many tiles added in blocks, so that no program of the last level has many to add; few as they are."""
    *rows, tiles = partial_ckt.shape
    if tiles <= _FOLD_BLOCK:
        return partial_ckt
    blocks = triton.cdiv(tiles, _FOLD_BLOCK)
    folded_ckt = torch.empty((*rows, blocks), dtype=torch.float64, device=partial_ckt.device)
    parts.fold_sums[(math.prod(rows), blocks)](partial_ckt, folded_ckt, tiles, blocks, BLOCK=_FOLD_BLOCK)
    return folded_ckt


def _finish(partial_kt: Tensor, controller: Controller) -> Tensor:
    """The gradient of a controller from the sums of its tiles."""
    gradient_p = torch.empty_like(controller.values_p, memory_format=torch.contiguous_format)
    parts.finish_sums[(controller.num_streams + 1,)](
        partial_kt,
        partial_kt.shape[1],
        controller.values_p,
        gradient_p,
        gradient_p.shape[0],
        K=controller.num_streams,
        KIND=_KINDS[controller.kind],
        SLOPE_SCALE=1.0 if controller.kind == "factor" else controller.slope_scale,
        BLOCK=_FINISH_BLOCK,
    )
    return gradient_p
