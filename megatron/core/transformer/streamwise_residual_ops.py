"""Streamwise residual operators: read K streams into one branch input, write one branch update into K streams.

    z = streamwise_sigmoid_read(x, read_logits, num_streams)                # z   = sum_k sigmoid(r_k) X_k
    y = streamwise_sigmoid_writeback(x, u, write_logits, num_streams)       # Y_k = X_k + 2 sigmoid(s_k) u
    z = streamwise_read(x, read_factors)                                    # the same, given the factors themselves
    y = streamwise_writeback(x, u, write_factors, retention_factors=g)      # Y_k = g_k X_k + w_k u
    y, z = streamwise_sigmoid_write_read(x, u, write_logits, read_logits, num_streams)     # a write and the next read
    n = streamwise_sigmoid_read(x, read_logits, num_streams, norm=StreamNorm("RMSNorm", 1024, 1e-5, weight))

The last dimension of a wide stream is stream-major: stream k is the slice [k*D, (k+1)*D). Equations: wide_residual.py.

What always holds:
- Sums are accumulated in fp32 (fp64 as soon as one input is fp64) and rounded once, at the store.
- No temporary of K*D elements per token is made beyond the result itself. A non-contiguous input may be an exception:
  it is made contiguous first. So is the backward of a fused write and read where the backend brings none of its own.
- A norm sees z rounded to its dtype, as it does behind the read; it is fused with it or runs after it by the backend,
  the dtypes and the width (streamwise_residual_norm). Fused, what the backward passes to the read is not rounded.
- Bias and dropout of a write come before it, with one mask for all streams. The mask is drawn from PyTorch's generator
  of the device at the call, so a call repeated under the same generator state drops the same elements.
- The backward is written by hand and differentiable once. Without retention the gradient of a write's residual stream
  is the incoming gradient itself, not a copy.
- Results depend on the inputs alone: not on grad mode, on requires_grad or on contiguity. Repeating a call gives the
  same bits. The device and MEGATRON_STREAMWISE_BACKEND decide which kernels run (streamwise_residual_backends).

Tensor names: n tokens, k streams, d branch width, w wide width K*D, p length of a padded controller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_autograd import sum_dtype_of
from megatron.core.transformer.streamwise_residual_backends import streamwise_operators
from megatron.core.transformer.streamwise_residual_checks import (
    check_bias,
    check_branch_update,
    check_controller,
    check_dropout,
    check_max_forget,
    check_norm,
    check_num_streams,
    check_output_dtype,
    check_wide_stream,
)
from megatron.core.transformer.streamwise_residual_controllers import (
    sigmoid_read_factors,
    sigmoid_retention_factors,
    sigmoid_write_factors,
)
from megatron.core.transformer.streamwise_residual_norm import StreamNorm, stream_norm_of
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators, WriteOptions

__all__ = [
    "sigmoid_read_factors",
    "sigmoid_retention_factors",
    "sigmoid_write_factors",
    "stream_norm_of",
    "streamwise_read",
    "streamwise_sigmoid_read",
    "streamwise_sigmoid_write_read",
    "streamwise_sigmoid_writeback",
    "streamwise_writeback",
]


def _outside_graphs[**P, R](operator: Callable[P, R]) -> Callable[P, R]:
    """An operator as it is; one graph break for torch.compile, since checks and kernels are no graphs of operations."""
    disabled = torch._disable_dynamo(
        operator
    )  # imports PyTorch's compiler when first called: only for a compiled layer

    @functools.wraps(operator)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)
        return operator(*args, **kwargs)

    return run


@_outside_graphs
def streamwise_sigmoid_read(
    hidden_states: Tensor,
    read_logits: Tensor,
    num_streams: int,
    *,
    output_dtype: torch.dtype | None = None,
    norm: StreamNorm | None = None,
) -> Tensor:
    """Mix the streams of `hidden_states` into one branch input: z = sum_k sigmoid(r_k) X_k.

    Args:
        hidden_states: [..., K*D], any floating dtype.
        read_logits: [p] with p >= K, fp32 or fp64. Only the first K are active; the gradient of the rest is exactly 0.
        num_streams: K >= 1.
        output_dtype: dtype of z, by default that of `hidden_states`; the cast is part of the one rounding.
        norm: makes the result norm(z).

    Returns: [..., D].
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    z: Tensor = _sigmoid_read(hidden_states, read_logits, num_streams, output_dtype, norm, passes=False)
    return z


@_outside_graphs
def streamwise_sigmoid_read_through(
    hidden_states: Tensor,
    read_logits: Tensor,
    num_streams: int,
    *,
    output_dtype: torch.dtype | None = None,
    norm: StreamNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Read as streamwise_sigmoid_read and return the stream too, for whatever uses it beside this read.

    The gradient of that use and the gradient of the read are then added in one pass over the stream, with the bits of
    an addition of their own; autograd would make that a pass more.

    Args, errors: as streamwise_sigmoid_read.
    Returns: z [..., D], and `hidden_states` [..., K*D], of the same memory.
    """
    z, x = _sigmoid_read(hidden_states, read_logits, num_streams, output_dtype, norm, passes=True)
    return z, x


@_outside_graphs
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
    operators = streamwise_operators(hidden_states.device)
    z: Tensor = operators.read(
        hidden_states, read_factors, None, num_streams=num_streams, is_logit=False, z_dtype=dtype, passes=False
    )
    return z


@_outside_graphs
def streamwise_sigmoid_writeback(
    residual_stream: Tensor,
    branch_update: Tensor,
    write_logits: Tensor,
    num_streams: int,
    *,
    retention_logits: Tensor | None = None,
    retention_max_forget: float = 0.0,
    bias: Tensor | None = None,
    dropout_probability: float = 0.0,
) -> Tensor:
    """Write a branch update into every stream: Y_k = g_k X_k + 2 sigmoid(s_k) u, with g_k = 1 - F sigmoid(-q_k).

    Args:
        residual_stream: [..., K*D], any floating dtype.
        branch_update: [..., D] with the same leading shape, any floating dtype.
        write_logits: [p] with p >= K, fp32 or fp64. Only the first K are active; the gradient of the rest is exactly 0.
        num_streams: K >= 1.
        retention_logits: q, like `write_logits`; None (the default) keeps every stream whole: g_k = 1.
        retention_max_forget: F, in (0, 1) where `retention_logits` are given; without them it has no effect.
        bias: [D] or any shape that broadcasts to the update's; added to the update first.
        dropout_probability: of the sum of update and bias, in [0, 1]; what is kept is divided by 1 - p.

    Returns: [..., K*D] in the dtype of `residual_stream`.
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    _check_sigmoid_write(
        residual_stream, branch_update, write_logits, num_streams, retention_logits, retention_max_forget
    )
    options = WriteOptions(num_streams, True, float(retention_max_forget), float(dropout_probability))
    operators = streamwise_operators(residual_stream.device)
    update, bias, seed = _prepare_update(operators, residual_stream, branch_update, bias, dropout_probability)
    return operators.write(residual_stream, update, bias, seed, write_logits, retention_logits, options)


@_outside_graphs
def streamwise_sigmoid_write_read(
    residual_stream: Tensor,
    branch_update: Tensor,
    write_logits: Tensor,
    read_logits: Tensor,
    num_streams: int,
    *,
    retention_logits: Tensor | None = None,
    retention_max_forget: float = 0.0,
    bias: Tensor | None = None,
    dropout_probability: float = 0.0,
    output_dtype: torch.dtype | None = None,
    norm: StreamNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Write a branch update into every stream and read the next branch's input in the same pass over the stream.

    Y_k = g_k X_k + 2 sigmoid(s_k) u as streamwise_sigmoid_writeback, z = sum_k sigmoid(r_k) Y_k of the rounded Y as
    streamwise_sigmoid_read, bit-equal to the two calls. Y is not kept for the backward, which computes it again.

    Args: as the two operators; `output_dtype` is that of z, and a norm makes it norm(z).
    Returns: Y [..., K*D] in the dtype of `residual_stream`, z [..., D].
    Raises: TypeError, ValueError: an argument of the wrong kind, shape, dtype or device; the message names it.
    """
    _check_sigmoid_write(
        residual_stream, branch_update, write_logits, num_streams, retention_logits, retention_max_forget
    )
    check_controller("read_logits", read_logits, residual_stream, at_least=num_streams)
    check_norm(norm, residual_stream, num_streams)
    dtype = check_output_dtype(output_dtype, residual_stream)
    options = WriteOptions(num_streams, True, float(retention_max_forget), float(dropout_probability))
    operators = streamwise_operators(residual_stream.device)
    update, bias, seed = _prepare_update(operators, residual_stream, branch_update, bias, dropout_probability)
    controllers = (write_logits, retention_logits, read_logits)
    fused, after = _split_norm(operators, norm, dtype, residual_stream, update, *controllers)
    y, z = operators.write_read(residual_stream, update, bias, seed, *controllers, fused, options, dtype)
    return y, z if after is None else after(z)


@_outside_graphs
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
    operators = streamwise_operators(residual_stream.device)
    options = WriteOptions(num_streams, False)
    return operators.write(residual_stream, branch_update, None, None, write_factors, retention_factors, options)


def _sigmoid_read(
    hidden_states: Tensor,
    read_logits: Tensor,
    num_streams: int,
    output_dtype: torch.dtype | None,
    norm: StreamNorm | None,
    *,
    passes: bool,
) -> Any:
    """z, or (z, hidden_states) where that passes through."""
    check_num_streams(num_streams)
    check_wide_stream("hidden_states", hidden_states, num_streams)
    check_controller("read_logits", read_logits, hidden_states, at_least=num_streams)
    check_norm(norm, hidden_states, num_streams)
    dtype = check_output_dtype(output_dtype, hidden_states)
    operators = streamwise_operators(hidden_states.device)
    fused, after = _split_norm(operators, norm, dtype, hidden_states, read_logits)
    joins = passes and hidden_states.requires_grad  # of a stream without gradient there is nothing to add
    found = operators.read(
        hidden_states, read_logits, fused, num_streams=num_streams, is_logit=True, z_dtype=dtype, passes=joins
    )
    z, x = found if joins else (found, hidden_states)
    z = z if after is None else after(z)
    return (z, x) if passes else z


def _split_norm(
    operators: StreamwiseOperators,
    norm: StreamNorm | None,
    branch_dtype: torch.dtype,
    stream: Tensor,
    *others: Tensor | None,
) -> tuple[StreamNorm | None, StreamNorm | None]:
    """(the norm where the backend fuses it, the norm where it runs after the operator)."""
    if norm is None:
        return None, None
    dtypes = (stream.dtype, branch_dtype, sum_dtype_of(stream, *others))
    fuses = norm.takes(branch_dtype) and operators.fuses_norm(norm.width, *dtypes)
    return (norm, None) if fuses else (None, norm)


def _check_sigmoid_write(
    residual_stream: Tensor,
    branch_update: Tensor,
    write_logits: Tensor,
    num_streams: int,
    retention_logits: Tensor | None,
    retention_max_forget: float,
) -> None:
    """Refuse what no write by logits can take."""
    check_num_streams(num_streams)
    check_wide_stream("residual_stream", residual_stream, num_streams)
    check_branch_update(branch_update, residual_stream, num_streams)
    check_controller("write_logits", write_logits, residual_stream, at_least=num_streams)
    check_max_forget(retention_max_forget, needed=retention_logits is not None)
    if retention_logits is not None:
        check_controller("retention_logits", retention_logits, residual_stream, at_least=num_streams)


def _prepare_update(
    operators: StreamwiseOperators, stream: Tensor, update: Tensor, bias: Tensor | None, dropout_probability: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(update, bias, seed) for the backend; bias and dropout are applied here where the backend does not fuse them.

    Here they are rounded like the ordinary model's add: in the dtype of the stream, which matters beside an fp32 one;
    a backend that fuses the bias alone does the same. One that fuses dropout adds, drops and writes in the dtype of the
    sums and rounds once. Its seed comes from the device's generator and stays on the device.
    """
    check_bias(bias, update)
    check_dropout(dropout_probability)
    is_plain = bias is not None and bias.dim() == 1 and bias.dtype is update.dtype and not dropout_probability
    if is_plain and operators.fuses_bias(stream.dtype, update.dtype):
        return update, bias, None
    if operators.fuses_dropout:
        if bias is not None and bias.dim() != 1:
            update, bias = update + bias.to(update.dtype), None
        seed = None
        if dropout_probability > 0:
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=update.device)
        return update, bias, seed
    if update.dtype != stream.dtype and (bias is not None or dropout_probability > 0):
        update = update.to(stream.dtype)
    if bias is not None:
        update = update + bias.to(update.dtype)
    if dropout_probability > 0:
        update = torch.nn.functional.dropout(update, p=dropout_probability, training=True)
    return update, None, None
