"""Eager kernels of the streamwise operators, one stream at a time: right on every device and in every dtype.

Chosen by streamwise_residual_backends, used by streamwise_residual_ops. Arithmetic is done in the dtype of the factors
(fp32 or fp64), to which one-element factor vectors promote every operation, and rounded at the store; nothing with a
stream dimension is allocated except a result. No value is ever brought to the host.

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_forward(x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype) -> Tensor:
    """z_nd = sum_k f_k X_k."""
    return _mix(x_nkd.unbind(1), factor_k.split(1)).to(output_dtype)


def read_backward(
    grad_z_nd: Tensor, x_nkd: Tensor | None, factor_k: Tensor, x_dtype: torch.dtype, *, wants_grad_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(f_k gZ in x_dtype, sum_nd X_k gZ); the first is None unless wanted, the second where x_nkd is."""
    grad_x_nkd = grad_factor_k = None
    if wants_grad_x:
        n, d = grad_z_nd.shape
        grad_x_nkd = grad_z_nd.new_empty((n, factor_k.shape[0], d), dtype=x_dtype)
        for k, factor in enumerate(factor_k.split(1)):
            torch.mul(grad_z_nd, factor, out=grad_x_nkd[:, k])
    if x_nkd is not None:
        grad_factor_k = _dots(x_nkd.unbind(1), [grad_z_nd] * factor_k.shape[0], factor_k.dtype)
    return grad_x_nkd, grad_factor_k


def write_forward(x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
    """y_nkd = g_k X_k + w_k u in the dtype of X."""
    y_nkd = torch.empty_like(x_nkd)
    retentions = [None] * factor_k.shape[0] if retention_k is None else retention_k.split(1)
    for k, (factor, retention) in enumerate(zip(factor_k.split(1), retentions, strict=True)):
        kept_nd = x_nkd[:, k] if retention is None else x_nkd[:, k] * retention
        torch.addcmul(kept_nd, u_nd, factor, out=y_nkd[:, k])
    return y_nkd


def write_backward(
    grad_y_nkd: Tensor,
    x_nkd: Tensor | None,
    u_nd: Tensor | None,
    factor_k: Tensor,
    retention_k: Tensor | None,
    u_dtype: torch.dtype,
    *,
    wants_grad_u: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(g_k gY_k, sum_k w_k gY_k in u_dtype, sum_nd u gY_k, sum_nd X_k gY_k); None where unwanted or an input is."""
    grad_x_nkd = None
    if retention_k is not None:
        grad_x_nkd = torch.empty_like(grad_y_nkd)
        for k, retention in enumerate(retention_k.split(1)):
            torch.mul(grad_y_nkd[:, k], retention, out=grad_x_nkd[:, k])
    grad_u_nd = read_forward(grad_y_nkd, factor_k, u_dtype) if wants_grad_u else None
    grads = grad_y_nkd.unbind(1)
    grad_factor_k = None if u_nd is None else _dots(grads, [u_nd] * len(grads), factor_k.dtype)
    grad_retention_k = None if x_nkd is None else _dots(grads, x_nkd.unbind(1), factor_k.dtype)
    return grad_x_nkd, grad_u_nd, grad_factor_k, grad_retention_k


def _mix(streams: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """Sum of factor * stream, halves first, so that 2, 4, 8... equal streams read by 1/K give the stream exactly."""
    if len(streams) == 1:
        return streams[0] * factors[0]
    if len(streams) == 2:
        return (streams[0] * factors[0]).addcmul_(streams[1], factors[1])
    half = len(streams) // 2
    return _mix(streams[:half], factors[:half]).add_(_mix(streams[half:], factors[half:]))


def _dots(left: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[K] in fp64: the sum over n and d of left_k * right_k, products in `dtype`."""
    return torch.stack([(a.to(dtype) * b).sum(dtype=torch.float64) for a, b in zip(left, right, strict=True)])
