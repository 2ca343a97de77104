"""The streamwise operators on Triton kernels.

    operators = TritonOperators()
    y, z = operators.write_read_forward(x, update, write, retention, read, torch.bfloat16)

StreamwisePasses of megatron.core.transformer.streamwise_residual_protocol, chosen by streamwise_residual_backends
for CUDA tensors, and for CPU tensors under TRITON_INTERPRET=1. What always holds: each operator is one kernel, with a
norm too (streamwise_triton_norm_operators), each controller's gradient one more; bias and dropout of an update are part
of the write; any strides with contiguous rows are taken as they are, others are made contiguous; K from 1 to 16;
nothing waits for the device.

Names: n tokens, k streams, d branch width, p padded controller; a bare x or y has shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions import streamwise_triton_norm_operators as norms
from megatron.core.fusions.streamwise_triton_configs import MAX_NORM_WIDTH
from megatron.core.fusions.streamwise_triton_launch import (
    KINDS,
    MAX_STREAMS,
    Rows,
    check_streams,
    finish,
    folded,
    values_of,
    write_constants,
)
from megatron.core.fusions.streamwise_triton_read import read_backward, read_forward
from megatron.core.fusions.streamwise_triton_write import write_backward, write_forward
from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseUpdate, WriteGradients, WriteReadGradients


class TritonOperators:
    """StreamwisePasses through Triton."""

    name = "triton"
    fuses_dropout = True
    max_streams: int | None = MAX_STREAMS

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        return {
            "read": self.name,
            "write": self.name,
            "write and read": "in one pass",
            "read and norm": f"in one pass up to D={MAX_NORM_WIDTH}, whose row is held in registers",
            "bias and dropout": "in the write",
        }

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        del stream_dtype, branch_dtype, sum_dtype
        return width <= MAX_NORM_WIDTH

    def fuses_bias(self, stream_dtype: torch.dtype, branch_dtype: torch.dtype) -> bool:
        del stream_dtype, branch_dtype
        return True

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype, norm: NormCall | None = None) -> Tensor:
        check_streams(read)
        if norm is not None:
            return norms.read_forward(x, read, z_dtype, norm)
        z = x.new_empty((*x.shape[:-1], x.shape[-1] // read.num_streams), dtype=z_dtype)
        rows = Rows(z)
        if rows.count:
            read_forward[rows.forward_grid](
                *rows.of(x),
                read.values_p,
                z,
                rows.count,
                rows.inner,
                **rows.shape(read),
                READ_KIND=KINDS[read.kind],
                MANY=rows.many,
            )
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
        if norm is not None:
            assert x is not None
            return norms.read_backward(grad_z, x, read, through, norm)
        rows = Rows(grad_z)
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
                partial if through is None else through.contiguous(),
                partial if grad_x is None else grad_x,
                partial,
                rows.count,
                rows.inner,
                rows.tiles,
                **rows.shape(read),
                READ_KIND=KINDS[read.kind],
                WANTS_X=wants_grad_x,
                WANTS_READ=x is not None,
                THROUGH=through is not None,
                enable_fp_fusion=False,
                **rows.tile,
            )
        return grad_x, None if x is None else finish(folded(partial)[0], read)

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
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor]:
        if norm is not None:
            check_streams(write)
            return norms.write_read_forward(x, update, write, retention, read, z_dtype, norm)
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
        check_streams(write)
        u = update.tensor()
        rows = Rows(u)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows.count:
            write_forward[rows.forward_grid](
                *rows.of(x),
                *rows.of(u),
                u if update.bias_d is None else update.bias_d.contiguous(),
                u if update.seed is None else update.seed,
                *values_of(write, retention, read),
                y,
                y if z is None else z,
                rows.count,
                rows.inner,
                **rows.shape(write),
                **write_constants(update, write, retention, read),
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
        partial = folded(partial)
        return WriteGradients(
            grad_y if wants_grad_x and retention is None else grad_x,  # without retention the incoming gradient itself
            grad_u,
            None if update.u is None else finish(partial[0], write),
            None if x is None or retention is None else finish(partial[1], retention),
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
        norm: NormCall | None = None,
    ) -> WriteReadGradients:
        if norm is not None:
            return norms.write_read_backward(grad_y, grad_z, x, update, write, retention, read, norm)
        grad_x, grad_u, partial = self._write_gradients(
            grad_y, grad_z, x, update, write, retention, read, wants_x=True, wants_u=True
        )
        assert grad_x is not None
        assert grad_u is not None
        partial = folded(partial)
        return WriteReadGradients(
            grad_x,
            grad_u,
            finish(partial[0], write),
            None if retention is None else finish(partial[1], retention),
            finish(partial[2], read),
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
        rows = Rows(grad_y, columns=shape[-1])
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
                *values_of(write, retention, read),
                partial if grad_x is None else grad_x,
                partial if grad_u is None else grad_u,
                partial,
                rows.count,
                rows.inner,
                rows.tiles,
                **rows.shape(write),
                **write_constants(update, write, retention, read),
                WANTS_X=wants_x,
                WANTS_U=wants_u,
                WANTS_WRITE=update.u is not None,
                WANTS_RETENTION=x is not None and retention is not None,
                **rows.tile,
            )
        return grad_x, grad_u, partial
