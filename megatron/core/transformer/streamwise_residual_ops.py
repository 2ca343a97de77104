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

import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_checked as checked
from megatron.core.transformer.streamwise_residual_checked import outside_graphs
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
from megatron.core.transformer.streamwise_residual_protocol import WriteOptions

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


@outside_graphs
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
    dtype = _check_sigmoid_read(hidden_states, read_logits, num_streams, output_dtype, norm)
    return checked.read(hidden_states, read_logits, num_streams, dtype, norm)


@outside_graphs
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
    dtype = _check_sigmoid_read(hidden_states, read_logits, num_streams, output_dtype, norm)
    return checked.read_through(hidden_states, read_logits, num_streams, dtype, norm)


@outside_graphs
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
    return checked.read(hidden_states, read_factors, num_streams, dtype, is_logit=False)


@outside_graphs
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
    check_bias(bias, branch_update)
    check_dropout(dropout_probability)
    options = WriteOptions(num_streams, True, float(retention_max_forget), float(dropout_probability))
    return checked.write(residual_stream, branch_update, bias, write_logits, retention_logits, options)


@outside_graphs
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
    check_bias(bias, branch_update)
    check_dropout(dropout_probability)
    dtype = _check_sigmoid_read(residual_stream, read_logits, num_streams, output_dtype, norm)
    options = WriteOptions(num_streams, True, float(retention_max_forget), float(dropout_probability))
    controllers = (write_logits, retention_logits, read_logits)
    return checked.write_read(residual_stream, branch_update, bias, *controllers, options, dtype, norm)


@outside_graphs
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
    options = WriteOptions(num_streams, False)
    return checked.write(residual_stream, branch_update, None, write_factors, retention_factors, options)


def _check_sigmoid_read(
    hidden_states: Tensor,
    read_logits: Tensor,
    num_streams: int,
    output_dtype: torch.dtype | None,
    norm: StreamNorm | None,
) -> torch.dtype:
    """Refuse what no read by logits can take; the dtype of its result."""
    check_num_streams(num_streams)
    check_wide_stream("hidden_states", hidden_states, num_streams)
    check_controller("read_logits", read_logits, hidden_states, at_least=num_streams)
    check_norm(norm, hidden_states, num_streams)
    return check_output_dtype(output_dtype, hidden_states)


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
