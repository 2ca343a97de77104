"""The streamwise operators as autograd functions, over the forwards and backwards of a backend.

    operators = AutogradOperators(FactorOperators("eager", streamwise_residual_kernels))
    y = operators.write(x, u, None, None, write_logits_p, None, WriteOptions(num_streams=4, is_logit=True))

Made by streamwise_residual_backends, called by streamwise_residual_ops after its argument checks. What always
holds: the backward is written by hand and differentiable once; it runs on the backend of its forward; only what a
wanted gradient needs is saved, and for the fused write and read that is its inputs alone, never Y. A norm adds one or
two numbers per token, never z.

Tensor names: n tokens, k streams, d branch width, p padded controller; x and y have shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall, StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import (
    StreamwisePasses,
    StreamwiseUpdate,
    WriteOptions,
    WriteReadGradients,
)


class AutogradOperators:
    """StreamwiseOperators over StreamwisePasses; both are defined in streamwise_residual_protocol."""

    def __init__(self, passes: StreamwisePasses) -> None:
        self._passes = passes
        self.name, self.fuses_dropout, self.max_streams = passes.name, passes.fuses_dropout, passes.max_streams
        self.paths, self.fuses_norm, self.fuses_bias = passes.paths, passes.fuses_norm, passes.fuses_bias

    def read(
        self,
        x: Tensor,
        read_p: Tensor,
        norm: StreamNorm | None,
        *,
        num_streams: int,
        is_logit: bool,
        z_dtype: torch.dtype,
        passes: bool,
    ) -> Any:
        tensors = (x, read_p, *_parameters(norm))
        return StreamwiseRead.apply(*tensors, self._passes, num_streams, is_logit, z_dtype, norm, passes)

    def write(
        self,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        options: WriteOptions,
    ) -> Tensor:
        y: Tensor = StreamwiseWrite.apply(x, u, bias_d, seed, write_p, retention_p, self._passes, options)
        return y

    def write_read(
        self,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        read_p: Tensor,
        norm: StreamNorm | None,
        options: WriteOptions,
        z_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        tensors = (x, u, bias_d, seed, write_p, retention_p, read_p, *_parameters(norm))
        y, z = StreamwiseWriteRead.apply(*tensors, self._passes, options, z_dtype, norm)
        return y, z


class StreamwiseRead(torch.autograd.Function):
    """z = sum_k f_k X_k, with f = sigmoid(controller) or f = controller; with a norm, norm(z).

    With `passes` it returns (z, X): what uses that X has its gradient added to that of the read in the backward's one
    pass over the stream. The bits are those of autograd's own addition.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        read_p: Tensor,
        weight_d: Tensor | None,
        bias_d: Tensor | None,
        operators: StreamwisePasses,
        num_streams: int,
        is_logit: bool,
        z_dtype: torch.dtype,
        norm: StreamNorm | None,
        passes: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        sum_dtype = sum_dtype_of(x, read_p)
        ctx.read = Controller(read_p, num_streams, "read" if is_logit else "factor", sum_dtype)
        call = _norm_call(norm, sum_dtype)
        z = operators.read_forward(x, ctx.read, z_dtype, call)
        needs_x = ctx.needs_input_grad[1] or norm is not None  # a norm's input is computed from it again
        ctx.save_for_backward(x if needs_x else None, read_p, weight_d, bias_d, *_statistics(call))
        ctx.operators, ctx.norm, ctx.x_dtype = operators, norm, x.dtype
        ctx.set_materialize_grads(False)
        return (z, x) if passes else z

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor | None, through: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        if grad_z is None:
            return _wanted(ctx, through)
        x, _, _, _, mean_n, scale_n = ctx.saved_tensors
        operators: StreamwisePasses = ctx.operators
        call = _norm_call(ctx.norm, ctx.read.sum_dtype, mean_n, scale_n)
        grad_x, grad_read_p = operators.read_backward(
            grad_z, x, ctx.read, ctx.x_dtype, wants_grad_x=ctx.needs_input_grad[0], through=through, norm=call
        )
        return _wanted(ctx, grad_x, grad_read_p, *_norm_gradients(call))


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
        operators: StreamwisePasses,
        options: WriteOptions,
    ) -> Tensor:
        ctx.write, ctx.retention = options.controllers(sum_dtype_of(x, u, write_p, retention_p), write_p, retention_p)
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
        needs_x, needs_u, needs_bias, _, needs_write = ctx.needs_input_grad[:5]
        if ctx.retention is None and not (needs_u or needs_bias or needs_write):
            return _wanted(ctx, grad_y)
        operators: StreamwisePasses = ctx.operators
        grad_x, grad_u, grad_write_p, grad_retention_p, grad_bias_d = operators.write_backward(
            grad_y,
            x,
            StreamwiseUpdate(u, ctx.u_dtype, bias_d, ctx.options.dropout, seed),
            ctx.write,
            ctx.retention,
            wants_grad_x=needs_x,
            wants_grad_u=needs_u or needs_bias,
        )
        grad_bias_d = _bias_gradient(grad_u, bias_d, grad_bias_d) if needs_bias else None
        return _wanted(ctx, grad_x, grad_u, grad_bias_d, None, grad_write_p, grad_retention_p)


class StreamwiseWriteRead(torch.autograd.Function):
    """(Y, z): a write, and the read of the branch after it in the same pass over the stream; with a norm, norm(z)."""

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
        weight_d: Tensor | None,
        norm_bias_d: Tensor | None,
        operators: StreamwisePasses,
        options: WriteOptions,
        z_dtype: torch.dtype,
        norm: StreamNorm | None,
    ) -> tuple[Tensor, Tensor]:
        sum_dtype = sum_dtype_of(x, u, write_p, retention_p, read_p)
        ctx.write, ctx.retention = options.controllers(sum_dtype, write_p, retention_p)
        ctx.read = Controller(read_p, options.num_streams, "read" if options.is_logit else "factor", sum_dtype)
        update = StreamwiseUpdate(u, u.dtype, bias_d, options.dropout, seed)
        call = _norm_call(norm, sum_dtype)
        y, z = operators.write_read_forward(x, update, ctx.write, ctx.retention, ctx.read, z_dtype, call)
        parameters = (write_p, retention_p, read_p, weight_d, norm_bias_d)
        assert not (options.keeps_y and retention_p is not None), "retention's gradient needs X"
        ctx.save_for_backward(y if options.keeps_y else x, u, bias_d, seed, *parameters, *_statistics(call))
        ctx.operators, ctx.options, ctx.norm = operators, options, norm
        return y, z

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, u, bias_d, seed, _, _, _, _, _, mean_n, scale_n = ctx.saved_tensors
        operators: StreamwisePasses = ctx.operators
        call = _norm_call(ctx.norm, ctx.read.sum_dtype, mean_n, scale_n)
        update = StreamwiseUpdate(u, u.dtype, bias_d, ctx.options.dropout, seed)
        if ctx.options.keeps_y:  # x is Y
            grad, grad_read_p = operators.read_backward(
                grad_z, x, ctx.read, x.dtype, wants_grad_x=True, through=grad_y, norm=call
            )
            assert grad is not None
            written = operators.write_backward(
                grad, None, update, ctx.write, None, wants_grad_x=True, wants_grad_u=True
            )
            found = WriteReadGradients.of(written, grad_read_p)
        else:
            found = operators.write_read_backward(grad_y, grad_z, x, update, ctx.write, ctx.retention, ctx.read, call)
        grad_bias_d = _bias_gradient(found.grad_u, bias_d, found.grad_bias_d) if ctx.needs_input_grad[2] else None
        controllers = (found.grad_write_p, found.grad_retention_p, found.grad_read_p)
        return _wanted(ctx, found.grad_x, found.grad_u, grad_bias_d, None, *controllers, *_norm_gradients(call))


def _parameters(norm: StreamNorm | None) -> tuple[Tensor | None, Tensor | None]:
    """What autograd must see of a norm."""
    return (None, None) if norm is None else (norm.weight_d, norm.bias_d)


def _norm_call(
    norm: StreamNorm | None, sum_dtype: torch.dtype, mean_n: Tensor | None = None, scale_n: Tensor | None = None
) -> NormCall | None:
    return None if norm is None else NormCall(norm, sum_dtype, mean_n, scale_n)


def _statistics(call: NormCall | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if call is None else (call.mean_n, call.scale_n)


def _norm_gradients(call: NormCall | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if call is None else call.gradients()


def _wanted(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the first inputs, None where autograd wants none, and None for the inputs behind them."""
    wanted = ctx.needs_input_grad
    behind = (None,) * (len(wanted) - len(gradients))
    return (*[found if is_wanted else None for found, is_wanted in zip(gradients, wanted, strict=False)], *behind)


def _bias_gradient(grad_u: Tensor | None, bias_d: Tensor, found_d: Tensor | None) -> Tensor:
    """What the operator found, else the sum of grad_u over the tokens in fp32 or wider; in the dtype of the bias."""
    if found_d is not None:
        return found_d if found_d.dtype is bias_d.dtype else found_d.to(bias_d.dtype)
    assert grad_u is not None
    wide = torch.promote_types(grad_u.dtype, torch.float32)
    return grad_u.view(-1, grad_u.shape[-1]).sum(0, dtype=wide).to(bias_d.dtype)


def sum_dtype_of(*inputs: Tensor | None) -> torch.dtype:
    """The dtype in which an operator with these inputs holds its sums: fp32, or fp64 as soon as one input is fp64."""
    for x in inputs:
        if x is not None and x.dtype is torch.float64:
            return torch.float64
    return torch.float32


def _refuse_second_derivative() -> None:
    """RuntimeError where the backward is itself to be differentiated: grad mode is on in a backward only then."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The streamwise residual operators are differentiable once: create_graph=True is not supported."
        )
