"""Streamwise residual operators: read K streams into one branch input, write one branch update into K streams.

    z = streamwise_sigmoid_read(x, read_logits, num_streams)                # z   = sum_k sigmoid(r_k) X_k
    y = streamwise_sigmoid_writeback(x, u, write_logits, num_streams)       # Y_k = X_k + 2 sigmoid(s_k) u
    z = streamwise_read(x, read_factors)                                    # the same, given the factors themselves
    y = streamwise_writeback(x, u, write_factors, retention_factors=g)      # Y_k = g_k X_k + w_k u

The last dimension of a wide stream is stream-major: stream k is the slice [k*D, (k+1)*D). Equations: wide_residual.py.

What always holds:
- Sums are accumulated in fp32 (fp64 as soon as one input is fp64) and rounded once, at the store.
- No temporary of K*D elements per token is made beyond the result itself. A non-contiguous input is the exception: it
  is made contiguous first.
- The backward is written by hand and differentiable once. Without retention the gradient of a write's residual stream
  is the incoming gradient itself, not a copy.
- Results depend on the inputs alone: not on grad mode, on requires_grad or on contiguity. Repeating a call gives the
  same bits. The device and MEGATRON_STREAMWISE_BACKEND decide which kernels run (streamwise_residual_backends).

Tensor names: n tokens, k streams, d branch width, w wide width K*D, p length of a padded controller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import StreamwiseKernels, streamwise_kernels
from megatron.core.transformer.streamwise_residual_checks import (
    check_branch_update,
    check_controller,
    check_max_forget,
    check_num_streams,
    check_output_dtype,
    check_wide_stream,
)


def streamwise_sigmoid_read(
    hidden_states: Tensor, read_logits: Tensor, num_streams: int, *, output_dtype: torch.dtype | None = None
) -> Tensor:
    """Mix the streams of `hidden_states` into one branch input: z = sum_k sigmoid(r_k) X_k.

    Args:
        hidden_states: [..., K*D], any floating dtype.
        read_logits: [p] with p >= K, fp32 or fp64. Only the first K are active; the gradient of the rest is exactly 0.
        num_streams: K >= 1.
        output_dtype: dtype of the result, by default that of `hidden_states`; the cast is part of the one rounding.

    Returns: [..., D].
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    check_num_streams(num_streams)
    check_wide_stream("hidden_states", hidden_states, num_streams)
    check_controller("read_logits", read_logits, hidden_states, at_least=num_streams)
    dtype = check_output_dtype(output_dtype, hidden_states)
    return _StreamwiseRead.apply(hidden_states, read_logits, num_streams, True, dtype)


def streamwise_read(hidden_states: Tensor, read_factors: Tensor, *, output_dtype: torch.dtype | None = None) -> Tensor:
    """Mix the streams of `hidden_states` into one branch input by given factors: z = sum_k f_k X_k.

    Args:
        hidden_states: [..., K*D], any floating dtype.
        read_factors: [K], fp32 or fp64; its length is the number of streams.
        output_dtype: dtype of the result, by default that of `hidden_states`; the cast is part of the one rounding.

    Returns: [..., D].
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    check_controller("read_factors", read_factors, hidden_states)
    num_streams = read_factors.shape[0]
    check_wide_stream("hidden_states", hidden_states, num_streams)
    dtype = check_output_dtype(output_dtype, hidden_states)
    return _StreamwiseRead.apply(hidden_states, read_factors, num_streams, False, dtype)


def streamwise_sigmoid_writeback(
    residual_stream: Tensor,
    branch_update: Tensor,
    write_logits: Tensor,
    num_streams: int,
    *,
    retention_logits: Tensor | None = None,
    retention_max_forget: float = 0.0,
) -> Tensor:
    """Write a branch update into every stream: Y_k = g_k X_k + 2 sigmoid(s_k) u, with g_k = 1 - F sigmoid(-q_k).

    Args:
        residual_stream: [..., K*D], any floating dtype.
        branch_update: [..., D] with the same leading shape, any floating dtype.
        write_logits: [p] with p >= K, fp32 or fp64. Only the first K are active; the gradient of the rest is exactly 0.
        num_streams: K >= 1.
        retention_logits: q, like `write_logits`; None (the default) keeps every stream whole: g_k = 1.
        retention_max_forget: F, in (0, 1) where `retention_logits` are given; without them it has no effect.

    Returns: [..., K*D] in the dtype of `residual_stream`.
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    check_num_streams(num_streams)
    check_wide_stream("residual_stream", residual_stream, num_streams)
    check_branch_update(branch_update, residual_stream, num_streams)
    check_controller("write_logits", write_logits, residual_stream, at_least=num_streams)
    check_max_forget(retention_max_forget, needed=retention_logits is not None)
    if retention_logits is not None:
        check_controller("retention_logits", retention_logits, residual_stream, at_least=num_streams)
    return _StreamwiseWrite.apply(
        residual_stream, branch_update, write_logits, retention_logits, num_streams, True, float(retention_max_forget)
    )


def streamwise_writeback(
    residual_stream: Tensor, branch_update: Tensor, write_factors: Tensor, *, retention_factors: Tensor | None = None
) -> Tensor:
    """Write a branch update into every stream by given factors: Y_k = g_k X_k + w_k u.

    Args:
        residual_stream: [..., K*D], any floating dtype.
        branch_update: [..., D] with the same leading shape, any floating dtype.
        write_factors: [K], fp32 or fp64; its length is the number of streams.
        retention_factors: [K], fp32 or fp64; None (the default) means g_k = 1.

    Returns: [..., K*D] in the dtype of `residual_stream`.
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    check_controller("write_factors", write_factors, residual_stream)
    num_streams = write_factors.shape[0]
    check_wide_stream("residual_stream", residual_stream, num_streams)
    check_branch_update(branch_update, residual_stream, num_streams)
    if retention_factors is not None:
        check_controller("retention_factors", retention_factors, residual_stream, exactly=num_streams)
    return _StreamwiseWrite.apply(
        residual_stream, branch_update, write_factors, retention_factors, num_streams, False, 0.0
    )


def sigmoid_read_factors(read_logits: Tensor, num_streams: int) -> Tensor:
    """[K] read factors sigmoid(r_k) of [p] logits, in the dtype of the logits; differentiable.

    Computed in fp64 and rounded once: an fp32 sigmoid is off by up to 2 ulp, which the sum over the streams keeps.
    """
    return read_logits[:num_streams].double().sigmoid().to(read_logits.dtype)


def sigmoid_write_factors(write_logits: Tensor, num_streams: int) -> Tensor:
    """[K] write factors 2 sigmoid(s_k) of [p] logits, in the dtype of the logits, rounded once; differentiable."""
    return (2 * write_logits[:num_streams].double().sigmoid()).to(write_logits.dtype)


def sigmoid_retention_factors(retention_logits: Tensor, num_streams: int, max_forget: float) -> Tensor:
    """[K] retention factors 1 - F sigmoid(-q_k) of [p] logits, in their dtype, rounded once; differentiable."""
    forget_k = torch.sigmoid(-retention_logits[:num_streams].double())
    return (1 - max_forget * forget_k).to(retention_logits.dtype)


def _as_streams(x: Tensor, num_streams: int) -> Tensor:
    """[..., K*D] -> [n, K, D], contiguous."""
    return x.contiguous().view(-1, num_streams, x.shape[-1] // num_streams)


def _as_tokens(x: Tensor) -> Tensor:
    """[..., D] -> [n, D], contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def _accumulate_dtype(*inputs: Tensor | None) -> torch.dtype:
    is_double = any(x is not None and x.dtype is torch.float64 for x in inputs)
    return torch.float64 if is_double else torch.float32


def _refuse_second_derivative() -> None:
    """RuntimeError where the backward is itself to be differentiated: grad mode is on in a backward only then."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The streamwise residual operators are differentiable once: create_graph=True is not supported."
        )


def _sigmoid_slope(logits_k: Tensor) -> Tensor:
    """sigmoid'(l) in fp64. It is even in l, and serves all three maps."""
    sigmoid_k = logits_k.double().sigmoid()
    return sigmoid_k * (1 - sigmoid_k)


def _controller_gradient(grad_k: Tensor, controller_p: Tensor) -> Tensor:
    """Gradient of a (padded) controller: `grad_k` rounded to its dtype, then exact zeros."""
    if controller_p.shape == grad_k.shape:
        return grad_k.to(controller_p.dtype)
    grad_p = torch.zeros_like(controller_p)
    grad_p[: grad_k.shape[0]].copy_(grad_k)
    return grad_p


class _StreamwiseRead(torch.autograd.Function):
    """z = sum_k f_k X_k, with f = sigmoid(controller) or f = controller."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, read_p: Tensor, num_streams: int, is_logit: bool, output_dtype: torch.dtype
    ) -> Tensor:
        kernels = streamwise_kernels(x.device)
        factor_k = sigmoid_read_factors(read_p, num_streams) if is_logit else read_p
        factor_k = factor_k.to(_accumulate_dtype(x, read_p)).contiguous()
        z_nd = kernels.read_forward(_as_streams(x, num_streams), factor_k, output_dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, read_p, factor_k)
        ctx.kernels, ctx.is_logit, ctx.x_shape, ctx.x_dtype = kernels, is_logit, x.shape, x.dtype
        return z_nd.view(*x.shape[:-1], z_nd.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, read_p, factor_k = ctx.saved_tensors
        num_streams = factor_k.shape[0]
        kernels: StreamwiseKernels = ctx.kernels
        grad_x_nkd, grad_factor_k = kernels.read_backward(
            _as_tokens(grad_z),
            None if x is None else _as_streams(x, num_streams),
            factor_k,
            ctx.x_dtype,
            wants_grad_x=ctx.needs_input_grad[0],
        )
        grad_x = None if grad_x_nkd is None else grad_x_nkd.view(ctx.x_shape)
        grad_read_p = None
        if grad_factor_k is not None:
            if ctx.is_logit:
                grad_factor_k = grad_factor_k * _sigmoid_slope(read_p[:num_streams])
            grad_read_p = _controller_gradient(grad_factor_k, read_p)
        return grad_x, grad_read_p, None, None, None


class _StreamwiseWrite(torch.autograd.Function):
    """Y_k = g_k X_k + w_k u, with w = 2 sigmoid(s), g = 1 - F sigmoid(-q), or with w and g given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        u: Tensor,
        write_p: Tensor,
        retention_p: Tensor | None,
        num_streams: int,
        is_logit: bool,
        max_forget: float,
    ) -> Tensor:
        kernels = streamwise_kernels(x.device)
        accumulate = _accumulate_dtype(x, u, write_p, retention_p)
        factor_k = sigmoid_write_factors(write_p, num_streams) if is_logit else write_p
        factor_k = factor_k.to(accumulate).contiguous()
        retention_k = retention_p
        if retention_k is not None:
            if is_logit:
                retention_k = sigmoid_retention_factors(retention_k, num_streams, max_forget)
            retention_k = retention_k.to(accumulate).contiguous()
        y_nkd = kernels.write_forward(_as_streams(x, num_streams), _as_tokens(u), factor_k, retention_k)
        saved_x = x if ctx.needs_input_grad[3] else None
        saved_u = u if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(saved_x, saved_u, write_p, retention_p, factor_k, retention_k)
        ctx.kernels, ctx.is_logit, ctx.max_forget = kernels, is_logit, max_forget
        ctx.u_shape, ctx.u_dtype = u.shape, u.dtype
        return y_nkd.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        x, u, write_p, retention_p, factor_k, retention_k = ctx.saved_tensors
        needs_x, needs_u, needs_write = ctx.needs_input_grad[:3]
        if retention_k is None and not (needs_u or needs_write):
            return grad_y, None, None, None, None, None, None
        num_streams = factor_k.shape[0]
        kernels: StreamwiseKernels = ctx.kernels
        grad_x_nkd, grad_u_nd, grad_factor_k, grad_retention_k = kernels.write_backward(
            _as_streams(grad_y, num_streams),
            None if x is None else _as_streams(x, num_streams),
            None if u is None else _as_tokens(u),
            factor_k,
            retention_k if needs_x else None,
            ctx.u_dtype,
            wants_grad_u=needs_u,
        )
        grad_x = None
        if needs_x:  # without retention the incoming gradient itself
            grad_x = grad_y if grad_x_nkd is None else grad_x_nkd.view(grad_y.shape)
        grad_write_p = grad_retention_p = None
        if grad_factor_k is not None:
            if ctx.is_logit:
                grad_factor_k = grad_factor_k * (2 * _sigmoid_slope(write_p[:num_streams]))
            grad_write_p = _controller_gradient(grad_factor_k, write_p)
        if grad_retention_k is not None:
            if ctx.is_logit:
                grad_retention_k = grad_retention_k * (ctx.max_forget * _sigmoid_slope(retention_p[:num_streams]))
            grad_retention_p = _controller_gradient(grad_retention_k, retention_p)
        return (
            grad_x,
            grad_u_nd.view(ctx.u_shape) if grad_u_nd is not None else None,
            grad_write_p,
            grad_retention_p,
            *(None, None, None),
        )
