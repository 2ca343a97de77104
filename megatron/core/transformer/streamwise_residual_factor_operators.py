"""Runs kernels that take factors (eager, compiled) as whole streamwise operators.

    operators = FactorOperators("eager", streamwise_residual_kernels)
    z = operators.read_forward(x, Controller(read_logits_p, 4, "read", torch.float32), torch.bfloat16)

Chosen by streamwise_residual_backends. It brings tensors of any shape to contiguous [n, K, D] and [n, D], turns
controllers into factors and gradients of factors into gradients of controllers, and composes the fused write and read
of a backend that brings none from its separate kernels. A norm behind a read is the kernels' own affair.

What always holds: the composed write and read gives the bits of the two operators one after the other, forward and
backward, and keeps nothing for its backward that a fused one does not keep: Y is computed again there.

Tensor names: n tokens, k streams, d branch width, p padded controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall
from megatron.core.transformer.streamwise_residual_protocol import (
    FusedStreamwiseKernels,
    NormingStreamwiseKernels,
    StreamwiseKernels,
    StreamwiseUpdate,
    WriteGradients,
    WriteReadGradients,
)


class FactorOperators:
    """StreamwiseOperators over StreamwiseKernels; both are defined in streamwise_residual_protocol."""

    fuses_update = False
    max_streams: int | None = None

    def __init__(self, name: str, kernels: StreamwiseKernels) -> None:
        self.name = name
        self._kernels = kernels
        fused = cast(FusedStreamwiseKernels, kernels) if hasattr(kernels, "write_read_forward") else None
        self._fused: FusedStreamwiseKernels | None = fused
        norming = cast(NormingStreamwiseKernels, kernels) if hasattr(kernels, "fuses_norm") else None
        self._norming: NormingStreamwiseKernels | None = norming

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        one, other = "in one pass", "one after the other"
        return {
            "read": self.name,
            "write": self.name,
            "write and read": one if self._fused is not None else other,
            "read and norm": one if self._norming is not None else other,
            "bias and dropout": "PyTorch",
        }

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        del width  # a row of any width stays in cache
        return self._norming is not None and self._norming.fuses_norm(stream_dtype, branch_dtype, sum_dtype)

    def _taking(self, norm: NormCall | None) -> dict[str, Any]:
        """The norm as a keyword of kernels that take one; nothing for others, which are never given any."""
        assert norm is None or self._norming is not None
        return {} if norm is None else {"norm": norm}

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype, norm: NormCall | None = None) -> Tensor:
        x_nkd = _as_streams(x, read.num_streams)
        z_nd = self._kernels.read_forward(x_nkd, read.factors(), z_dtype, **self._taking(norm))
        return _shaped(z_nd, (*x.shape[:-1], z_nd.shape[-1]))

    def read_backward(
        self,
        grad_z: Tensor,
        x: Tensor | None,
        read: Controller,
        x_dtype: torch.dtype,
        *,
        wants_grad_x: bool,
        norm: NormCall | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_x_nkd, grad_factor_k = self._kernels.read_backward(
            _as_tokens(grad_z),
            None if x is None else _as_streams(x, read.num_streams),
            read.factors(),
            x_dtype,
            wants_grad_x=wants_grad_x,
            **self._taking(norm),
        )
        grad_x = None if grad_x_nkd is None else _as_wide(grad_x_nkd, grad_z)
        return grad_x, None if grad_factor_k is None else read.gradient(grad_factor_k)

    def write_forward(
        self, x: Tensor, update: StreamwiseUpdate, write: Controller, retention: Controller | None
    ) -> Tensor:
        y_nkd = self._kernels.write_forward(
            _as_streams(x, write.num_streams),
            _as_tokens(update.tensor()),
            write.factors(),
            None if retention is None else retention.factors(),
        )
        return _shaped(y_nkd, x.shape)

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
        num_streams = write.num_streams
        grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k = self._kernels.write_backward(
            _as_streams(grad_y, num_streams),
            None if x is None else _as_streams(x, num_streams),
            None if update.u is None else _as_tokens(update.u),
            write.factors(),
            retention.factors() if retention is not None and wants_grad_x else None,
            update.dtype,
            wants_grad_u=wants_grad_u,
        )
        grad_x = None
        if wants_grad_x:  # without retention the incoming gradient itself
            grad_x = grad_y if grad_x_nkd is None else grad_x_nkd.view(grad_y.shape)
        return WriteGradients(
            grad_x,
            None if grad_u_nd is None else grad_u_nd.view(*grad_y.shape[:-1], grad_u_nd.shape[-1]),
            None if grad_write_k is None else write.gradient(grad_write_k),
            None if grad_retention_k is None or retention is None else retention.gradient(grad_retention_k),
        )

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
        x_nkd, u_nd = _as_streams(x, write.num_streams), _as_tokens(update.tensor())
        retention_k = None if retention is None else retention.factors()
        if self._fused is not None:
            y_nkd, z_nd = self._fused.write_read_forward(
                x_nkd, u_nd, write.factors(), retention_k, read.factors(), z_dtype, **self._taking(norm)
            )
        else:
            y_nkd = self._kernels.write_forward(x_nkd, u_nd, write.factors(), retention_k)
            z_nd = self._kernels.read_forward(y_nkd, read.factors(), z_dtype, **self._taking(norm))
        return _shaped(y_nkd, x.shape), _shaped(z_nd, update.tensor().shape)

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
        u = update.tensor()
        grad_y_nkd, x_nkd = _as_streams(grad_y, write.num_streams), _as_streams(x, write.num_streams)
        controllers = (write.factors(), None if retention is None else retention.factors(), read.factors())
        backward = self._compose_backward if self._fused is None else self._fused.write_read_backward
        grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k, grad_read_k = backward(
            grad_y_nkd, _as_tokens(grad_z), x_nkd, _as_tokens(u), *controllers, **self._taking(norm)
        )
        return WriteReadGradients(
            grad_x_nkd.view(x.shape),
            grad_u_nd.view(u.shape),
            write.gradient(grad_write_k),
            None if grad_retention_k is None or retention is None else retention.gradient(grad_retention_k),
            read.gradient(grad_read_k),
        )

    def _compose_backward(
        self,
        grad_y_nkd: Tensor,
        grad_z_nd: Tensor,
        x_nkd: Tensor,
        u_nd: Tensor,
        write_k: Tensor,
        retention_k: Tensor | None,
        read_k: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """write_read_backward of a backend that has none: Y again, then the backward of the read and of the write."""
        y_nkd = self._kernels.write_forward(x_nkd, u_nd, write_k, retention_k)
        total_nkd, grad_read_k = self._kernels.read_backward(grad_z_nd, y_nkd, read_k, x_nkd.dtype, wants_grad_x=True)
        del y_nkd
        assert total_nkd is not None
        assert grad_read_k is not None
        total_nkd += grad_y_nkd
        grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k = self._kernels.write_backward(
            total_nkd,
            None if retention_k is None else x_nkd,
            u_nd,
            write_k,
            retention_k,
            u_nd.dtype,
            wants_grad_u=True,
        )
        assert grad_u_nd is not None
        assert grad_write_k is not None
        return (
            total_nkd if grad_x_nkd is None else grad_x_nkd,
            grad_u_nd,
            grad_write_k,
            grad_retention_k,
            grad_read_k,
        )


def _shaped(result: Tensor, shape: Sequence[int]) -> Tensor:
    """A kernel's fresh result in another shape, not marked as a view of anything: upstream wraps views once more."""
    return torch.ops.aten._unsafe_view(result, shape)


def _as_streams(x: Tensor, num_streams: int) -> Tensor:
    """[..., K*D] -> [n, K, D], contiguous."""
    return x.contiguous().view(-1, num_streams, x.shape[-1] // num_streams)


def _as_tokens(x: Tensor) -> Tensor:
    """[..., D] -> [n, D], contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def _as_wide(x_nkd: Tensor, like: Tensor) -> Tensor:
    """[n, K, D] -> [..., K*D] with the leading dimensions of `like`."""
    return x_nkd.view(*like.shape[:-1], x_nkd.shape[1] * x_nkd.shape[2])
