"""Runs kernels that take factors, the eager ones, as forwards and backwards of the streamwise operators.

    operators = FactorOperators("eager", streamwise_residual_kernels)
    z = operators.read_forward(x, Controller(read_logits_p, 4, "read", torch.float32), torch.bfloat16)

Chosen by streamwise_residual_backends. It brings tensors of any shape to contiguous [n, K, D] and [n, D], turns
controllers into factors and gradients of factors into gradients of controllers, and composes the write and read from
the separate kernels. Norms, biases and dropout are left to PyTorch.

What always holds: the composed write and read gives the bits of the two operators one after the other, forward and
backward, and keeps nothing for its backward that a fused one does not keep: Y is computed again there.

Tensor names: n tokens, k streams, d branch width, p padded controller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall
from megatron.core.transformer.streamwise_residual_protocol import (
    StreamwiseKernels,
    StreamwiseUpdate,
    WriteGradients,
    WriteReadGradients,
)


class FactorOperators:
    """StreamwisePasses over StreamwiseKernels; both are defined in streamwise_residual_protocol."""

    fuses_dropout = False
    max_streams: int | None = None

    def __init__(self, name: str, kernels: StreamwiseKernels) -> None:
        self.name = name
        self._kernels = kernels

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        return {
            **dict.fromkeys(("read", "write"), self.name),
            **dict.fromkeys(("write and read", "read and norm"), "one after the other"),
            "bias and dropout": "PyTorch",
        }

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        del width, stream_dtype, branch_dtype, sum_dtype
        return False

    def fuses_bias(self, stream_dtype: torch.dtype, branch_dtype: torch.dtype) -> bool:
        del stream_dtype, branch_dtype
        return False

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype, norm: NormCall | None = None) -> Tensor:
        assert norm is None
        z_nd = self._kernels.read_forward(_as_streams(x, read.num_streams), read.factors(), z_dtype)
        return _shaped(z_nd, (*x.shape[:-1], z_nd.shape[-1]))

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
        assert norm is None
        grad_x_nkd, grad_factor_k = self._kernels.read_backward(
            _as_tokens(grad_z),
            None if x is None else _as_streams(x, read.num_streams),
            read.factors(),
            x_dtype,
            wants_grad_x=wants_grad_x,
        )
        grad_x = None if grad_x_nkd is None else _as_wide(grad_x_nkd, grad_z)
        if grad_x is not None and through is not None:
            grad_x += through
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
        y = self.write_forward(x, update, write, retention)
        return y, self.read_forward(y, read, z_dtype, norm)

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
        y = self.write_forward(x, update, write, retention)
        grad, grad_read_p = self.read_backward(grad_z, y, read, x.dtype, wants_grad_x=True, through=grad_y, norm=norm)
        del y
        assert grad is not None
        kept = None if retention is None else x
        found = self.write_backward(grad, kept, update, write, retention, wants_grad_x=True, wants_grad_u=True)
        return WriteReadGradients.of(found, grad_read_p)


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
