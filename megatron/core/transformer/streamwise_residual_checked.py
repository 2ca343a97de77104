"""The streamwise operators on arguments that have been checked: backend, norm, bias and dropout.

    z = read(x, read_logits_p, 4, torch.bfloat16, norm)
    y = write(x, u, bias, write_logits_p, retention_logits_p, WriteOptions(4, is_logit=True, max_forget=0.1))

Called by streamwise_residual_ops, which checks what anybody may give, and by the connections of wide_residual, which
check what a layer gives and name the layer in their messages; so every argument is looked at once.

What always holds: see streamwise_residual_ops. The compiled operators check once more what memory safety needs.

Tensor names: d branch width, p padded controller; x and y have shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_autograd import sum_dtype_of
from megatron.core.transformer.streamwise_residual_backends import streamwise_operators
from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators, WriteOptions


def outside_graphs[**P, R](operator: Callable[P, R]) -> Callable[P, R]:
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


@outside_graphs
def read(
    x: Tensor,
    read_p: Tensor,
    num_streams: int,
    z_dtype: torch.dtype,
    norm: StreamNorm | None = None,
    *,
    is_logit: bool = True,
) -> Tensor:
    """z = sum_k f_k X_k, or norm(z); f = sigmoid(read_p) or, unless `is_logit`, read_p."""
    operators = streamwise_operators(x.device)
    fused, after = _split_norm(operators, norm, z_dtype, x, read_p)
    z: Tensor = operators.read(
        x, read_p, fused, num_streams=num_streams, is_logit=is_logit, z_dtype=z_dtype, passes=False
    )
    return z if after is None else after(z)


@outside_graphs
def read_through(
    x: Tensor, read_p: Tensor, num_streams: int, z_dtype: torch.dtype, norm: StreamNorm | None = None
) -> tuple[Tensor, Tensor]:
    """(z, x) as streamwise_sigmoid_read_through."""
    if not x.requires_grad:  # there is nothing to add
        return read(x, read_p, num_streams, z_dtype, norm), x
    operators = streamwise_operators(x.device)
    fused, after = _split_norm(operators, norm, z_dtype, x, read_p)
    z, x = operators.read(x, read_p, fused, num_streams=num_streams, is_logit=True, z_dtype=z_dtype, passes=True)
    return z if after is None else after(z), x


@outside_graphs
def write(
    x: Tensor,
    u: Tensor,
    bias: Tensor | None,
    write_p: Tensor,
    retention_p: Tensor | None,
    options: WriteOptions,
) -> Tensor:
    """Y_k = g_k X_k + w_k dropout(u + bias)."""
    operators = streamwise_operators(x.device)
    u, bias, seed = _prepare_update(operators, x, u, bias, options.dropout)
    return operators.write(x, u, bias, seed, write_p, retention_p, options)


@outside_graphs
def write_read(
    x: Tensor,
    u: Tensor,
    bias: Tensor | None,
    write_p: Tensor,
    retention_p: Tensor | None,
    read_p: Tensor,
    options: WriteOptions,
    z_dtype: torch.dtype,
    norm: StreamNorm | None,
) -> tuple[Tensor, Tensor]:
    """(Y, z or norm(z)) as streamwise_sigmoid_write_read."""
    operators = streamwise_operators(x.device)
    u, bias, seed = _prepare_update(operators, x, u, bias, options.dropout)
    fused, after = _split_norm(operators, norm, z_dtype, x, u, write_p, retention_p, read_p)
    y, z = operators.write_read(x, u, bias, seed, write_p, retention_p, read_p, fused, options, z_dtype)
    return y, z if after is None else after(z)


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


def _prepare_update(
    operators: StreamwiseOperators, stream: Tensor, update: Tensor, bias: Tensor | None, dropout_probability: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(update, bias, seed) for the backend; bias and dropout are applied here where the backend does not fuse them.

    Here they are rounded like the ordinary model's add: in the dtype of the stream, which matters beside an fp32 one;
    a backend that fuses the bias alone does the same. One that fuses dropout adds, drops and writes in the dtype of the
    sums and rounds once. Its seed comes from the device's generator and stays on the device.
    """
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
