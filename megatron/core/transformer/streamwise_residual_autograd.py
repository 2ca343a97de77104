"""The streamwise operators as autograd functions, over the operators that streamwise_residual_backends chooses.

Called by streamwise_residual_ops after its argument checks. What always holds: the backward is written by hand and
differentiable once; it runs on the backend of its forward; only what a wanted gradient needs is saved, and for the
fused write and read that is its inputs alone, never Y.

Tensor names: n tokens, k streams, d branch width, p padded controller; x and y have shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import streamwise_operators
from megatron.core.transformer.streamwise_residual_controllers import Controller, ControllerKind
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators, StreamwiseUpdate


@dataclass(frozen=True)
class WriteOptions:
    """What a write is told beside tensors."""

    num_streams: int
    is_logit: bool
    max_forget: float = 0.0
    dropout: float = 0.0

    def controllers(
        self, sum_dtype: torch.dtype, write_p: Tensor, retention_p: Tensor | None
    ) -> tuple[Controller, Controller | None]:
        """(write, retention or None)."""
        write = Controller(write_p, self.num_streams, "write" if self.is_logit else "factor", sum_dtype)
        if retention_p is None:
            return write, None
        kind: ControllerKind = "retention" if self.is_logit else "factor"
        return write, Controller(retention_p, self.num_streams, kind, sum_dtype, self.max_forget)


class StreamwiseRead(torch.autograd.Function):
    """z = sum_k f_k X_k, with f = sigmoid(controller) or f = controller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read_p: Tensor, num_streams: int, is_logit: bool, z_dtype: torch.dtype) -> Tensor:
        operators = streamwise_operators(x.device)
        read = Controller(read_p, num_streams, "read" if is_logit else "factor", _sum_dtype(x, read_p))
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, read_p)
        ctx.operators, ctx.read, ctx.x_dtype = operators, read, x.dtype
        return operators.read_forward(x, read, z_dtype)

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, _ = ctx.saved_tensors
        operators: StreamwiseOperators = ctx.operators
        grad_x, grad_read_p = operators.read_backward(
            grad_z, x, ctx.read, ctx.x_dtype, wants_grad_x=ctx.needs_input_grad[0]
        )
        return grad_x, grad_read_p, None, None, None


class StreamwiseWrite(torch.autograd.Function):
    """Y_k = g_k X_k + w_k u, with w = 2 sigmoid(s), g = 1 - F sigmoid(-q), or with w and g given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        options: WriteOptions,
    ) -> Tensor:
        operators = streamwise_operators(x.device)
        ctx.write, ctx.retention = options.controllers(_sum_dtype(x, u, write_p, retention_p), write_p, retention_p)
        update = StreamwiseUpdate(u, u.dtype, bias_d, options.dropout, seed)
        needs_write, needs_retention = ctx.needs_input_grad[4:6]
        ctx.save_for_backward(
            x if needs_retention else None, u if needs_write else None, bias_d, seed, write_p, retention_p
        )
        ctx.operators, ctx.u_dtype, ctx.options = operators, u.dtype, options
        return operators.write_forward(x, update, ctx.write, ctx.retention)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, u, bias_d, seed, _, _ = ctx.saved_tensors
        needs_x, needs_u, needs_bias, _, needs_write, _, _ = ctx.needs_input_grad
        if ctx.retention is None and not (needs_u or needs_bias or needs_write):
            return grad_y, None, None, None, None, None, None
        operators: StreamwiseOperators = ctx.operators
        grad_x, grad_u, grad_write_p, grad_retention_p = operators.write_backward(
            grad_y,
            x,
            StreamwiseUpdate(u, ctx.u_dtype, bias_d, ctx.options.dropout, seed),
            ctx.write,
            ctx.retention,
            wants_grad_x=needs_x,
            wants_grad_u=needs_u or needs_bias,
        )
        grad_bias_d = _bias_gradient(grad_u, bias_d) if needs_bias else None
        return grad_x, grad_u if needs_u else None, grad_bias_d, None, grad_write_p, grad_retention_p, None


class StreamwiseWriteRead(torch.autograd.Function):
    """(Y, z): a write, and the read of the branch after it in the same pass over the stream."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        read_p: Tensor,
        options: WriteOptions,
        z_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        operators = streamwise_operators(x.device)
        sum_dtype = _sum_dtype(x, u, write_p, retention_p, read_p)
        ctx.write, ctx.retention = options.controllers(sum_dtype, write_p, retention_p)
        ctx.read = Controller(read_p, options.num_streams, "read" if options.is_logit else "factor", sum_dtype)
        ctx.save_for_backward(x, u, bias_d, seed, write_p, retention_p, read_p)
        ctx.operators, ctx.options = operators, options
        update = StreamwiseUpdate(u, u.dtype, bias_d, options.dropout, seed)
        return operators.write_read_forward(x, update, ctx.write, ctx.retention, ctx.read, z_dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, u, bias_d, seed, _, _, _ = ctx.saved_tensors
        operators: StreamwiseOperators = ctx.operators
        found = operators.write_read_backward(
            grad_y,
            grad_z,
            x,
            StreamwiseUpdate(u, u.dtype, bias_d, ctx.options.dropout, seed),
            ctx.write,
            ctx.retention,
            ctx.read,
        )
        grad_bias_d = _bias_gradient(found.grad_u, bias_d) if ctx.needs_input_grad[2] else None
        controllers = (found.grad_write_p, found.grad_retention_p, found.grad_read_p)
        gradients = (found.grad_x, found.grad_u, grad_bias_d, None, *controllers, None, None)
        return tuple(
            gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=True)
        )


def _bias_gradient(grad_u: Tensor | None, bias_d: Tensor) -> Tensor:
    """Sum over the tokens, in fp32 or wider, in the dtype of the bias."""
    assert grad_u is not None
    wide = torch.promote_types(grad_u.dtype, torch.float32)
    return grad_u.view(-1, grad_u.shape[-1]).sum(0, dtype=wide).to(bias_d.dtype)


def _sum_dtype(*inputs: Tensor | None) -> torch.dtype:
    is_double = any(x is not None and x.dtype is torch.float64 for x in inputs)
    return torch.float64 if is_double else torch.float32


def _refuse_second_derivative() -> None:
    """RuntimeError where the backward is itself to be differentiated: grad mode is on in a backward only then."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The streamwise residual operators are differentiable once: create_graph=True is not supported."
        )
