"""Launches of the Triton kernels that read and norm, alone or behind a write.

    n = read_forward(x, read, torch.bfloat16, call)          # sets the call's statistics
    grad_x, grad_read_p = read_backward(grad_n, x, read, None, call)           # sets the call's gradients

Used by streamwise_triton_operators, which has the arguments' meaning. What always holds: one kernel each way and, in a
backward, one more for every controller and for the norm's parameters; results do not depend on how tiles are tuned,
since a row's tile follows from D alone.

Names: n tokens, k streams, d branch width, p padded controller; a bare x or y has shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from megatron.core.fusions.streamwise_triton_configs import NORM_STEPS, norm_tile
from megatron.core.fusions.streamwise_triton_launch import (
    KINDS,
    Rows,
    finish,
    folded,
    values_of,
    write_constants,
)
from megatron.core.fusions.streamwise_triton_norm import (
    read_norm_backward,
    read_norm_forward,
    sum_programs,
    write_read_norm_backward,
    write_read_norm_forward,
)
from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseUpdate, WriteReadGradients

_SUM_ROWS, _SUM_COLUMNS = 32, 32


class _NormRows(Rows):
    """The rows of one call with a norm, in tiles of whole rows."""

    def __init__(self, narrow: Tensor, call: NormCall) -> None:
        super().__init__(narrow, columns=call.norm.width)
        self.tile = norm_tile(self.columns)
        self.forward_programs = triton.cdiv(self.count, self.tile["BN"])
        self.programs = triton.cdiv(self.forward_programs, NORM_STEPS)
        self.tiles = self.programs * NORM_STEPS
        self._call, self._device = call, narrow.device

    def constants(self, controller: Controller) -> dict[str, Any]:
        """Constants that every kernel with a norm takes."""
        return {**self.shape(controller), "IS_LAYER_NORM": self._call.is_layer_norm, **self.tile}

    def weight_and_bias(self) -> tuple[Tensor, Tensor]:
        """The norm's parameters; the weight stands in for a bias that is not there and not looked at."""
        weight_d, bias_d = self._call.weight(self._device), self._call.bias(self._device)
        return weight_d, weight_d if bias_d is None else bias_d

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(mean, scale) of the call; the scale stands in for a mean that is not there and not looked at."""
        scale_n = self._call.scale_n
        assert scale_n is not None
        return scale_n if self._call.mean_n is None else self._call.mean_n, scale_n

    def norm_partial(self) -> Tensor:
        """Room for the sums of every program of a backward: [programs, 2, D]."""
        return torch.empty((self.programs, 2, self.columns), dtype=self._call.sum_dtype, device=self._device)

    def set_gradients(self, norm_partial: Tensor) -> None:
        """Give the call the gradients of its parameters."""
        width = 2 * self.columns
        sums = torch.empty((2, self.columns), dtype=torch.float64, device=self._device)
        sum_programs[(triton.cdiv(width, _SUM_COLUMNS),)](
            norm_partial, sums, self.programs, WIDTH=width, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS
        )
        self._call.grad_weight_d = sums[0]
        self._call.grad_bias_d = sums[1] if self._call.is_layer_norm else None


def read_forward(x: Tensor, read: Controller, z_dtype: torch.dtype, call: NormCall) -> Tensor:
    """norm(z) of the read, in the dtype of z."""
    out = x.new_empty((*x.shape[:-1], call.norm.width), dtype=z_dtype)
    rows = _NormRows(out, call)
    call.allocate_statistics(rows.count, x.device)
    if rows.count:
        read_norm_forward[(rows.forward_programs,)](
            *rows.of(x),
            read.values_p,
            *rows.weight_and_bias(),
            out,
            *rows.statistics(),
            rows.count,
            rows.inner,
            **rows.constants(read),
            READ_KIND=KINDS[read.kind],
            EPS=call.norm.eps,
        )
    return out


def read_backward(
    grad: Tensor, x: Tensor, read: Controller, through: Tensor | None, call: NormCall
) -> tuple[Tensor, Tensor]:
    """(dX, added to `through` where that is there; gradient of the controller)."""
    rows = _NormRows(grad, call)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial, norm_partial = rows.partial(read, 1), rows.norm_partial()
    if rows.count:
        weight_d, _ = rows.weight_and_bias()
        read_norm_backward[(rows.programs,)](
            *rows.of(grad),
            *rows.of(x),
            read.values_p,
            weight_d,
            *rows.statistics(),
            grad_x if through is None else through.contiguous(),
            grad_x,
            partial,
            norm_partial,
            rows.count,
            rows.inner,
            rows.tiles,
            **rows.constants(read),
            READ_KIND=KINDS[read.kind],
            THROUGH=through is not None,
            STEPS=NORM_STEPS,
            enable_fp_fusion=False,
        )
    rows.set_gradients(norm_partial)
    return grad_x, finish(folded(partial)[0], read)


def write_read_forward(
    x: Tensor,
    update: StreamwiseUpdate,
    write: Controller,
    retention: Controller | None,
    read: Controller,
    z_dtype: torch.dtype,
    call: NormCall,
) -> tuple[Tensor, Tensor]:
    """(Y, norm(z))."""
    u = update.tensor()
    rows = _NormRows(u, call)
    out = x.new_empty(u.shape, dtype=z_dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.allocate_statistics(rows.count, x.device)
    if rows.count:
        write_read_norm_forward[(rows.forward_programs,)](
            *rows.of(x),
            *rows.of(u),
            u if update.bias_d is None else update.bias_d.contiguous(),
            u if update.seed is None else update.seed,
            *values_of(write, retention, read),
            *rows.weight_and_bias(),
            y,
            out,
            *rows.statistics(),
            rows.count,
            rows.inner,
            **rows.constants(write),
            **_write_constants(update, write, retention, read),
            EPS=call.norm.eps,
        )
    return y, out


def write_read_backward(
    grad_y: Tensor,
    grad: Tensor,
    x: Tensor,
    update: StreamwiseUpdate,
    write: Controller,
    retention: Controller | None,
    read: Controller,
    call: NormCall,
) -> WriteReadGradients:
    """All gradients but the norm's, which the call gets."""
    u = update.tensor()
    rows = _NormRows(grad, call)
    grad_u = torch.empty(u.shape, dtype=update.dtype, device=u.device)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial, norm_partial = rows.partial(write, 3), rows.norm_partial()
    if rows.count:
        weight_d, _ = rows.weight_and_bias()
        write_read_norm_backward[(rows.programs,)](
            *rows.of(grad_y),
            *rows.of(grad),
            *rows.of(x),
            *rows.of(u),
            u if update.bias_d is None else update.bias_d.contiguous(),
            u if update.seed is None else update.seed,
            *values_of(write, retention, read),
            weight_d,
            *rows.statistics(),
            grad_x,
            grad_u,
            partial,
            norm_partial,
            rows.count,
            rows.inner,
            rows.tiles,
            **rows.constants(write),
            **_write_constants(update, write, retention, read),
            STEPS=NORM_STEPS,
        )
    rows.set_gradients(norm_partial)
    partial = folded(partial)
    return WriteReadGradients(
        grad_x,
        grad_u,
        finish(partial[0], write),
        None if retention is None else finish(partial[1], retention),
        finish(partial[2], read),
    )


def _write_constants(
    update: StreamwiseUpdate, write: Controller, retention: Controller | None, read: Controller
) -> dict[str, Any]:
    """write_constants for kernels that always read."""
    constants = write_constants(update, write, retention, read)
    del constants["HAS_READ"]
    return constants
