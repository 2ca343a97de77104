"""Eager kernels of the streamwise operators, one stream at a time: right on every device and in every dtype.

Chosen by streamwise_residual_backends, used by streamwise_residual_ops. Sums run over [n, d] accumulators in the dtype
of the factors (fp32 or fp64); nothing with a stream dimension is allocated except a result.

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def read_forward(x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype) -> Tensor:
    """z_nd = sum_k f_k X_k."""
    sum_nd = x_nkd[:, 0] * factor_k[:1]
    for k in range(1, factor_k.shape[0]):
        sum_nd.addcmul_(x_nkd[:, k].to(factor_k.dtype), factor_k[k])
    return sum_nd.to(output_dtype)


def read_backward(
    grad_z_nd: Tensor, x_nkd: Tensor | None, factor_k: Tensor, x_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """(f_k gZ in x_dtype, sum_nd X_k gZ); an entry is None where x_dtype or x_nkd is None."""
    grad_x_nkd = grad_factor_k = None
    grad_z_nd = grad_z_nd.to(factor_k.dtype)
    if x_dtype is not None:
        n, d = grad_z_nd.shape
        grad_x_nkd = grad_z_nd.new_empty((n, factor_k.shape[0], d), dtype=x_dtype)
        for k in range(factor_k.shape[0]):
            grad_x_nkd[:, k] = grad_z_nd * factor_k[k]
    if x_nkd is not None:
        grad_factor_k = _stream_dots(x_nkd, grad_z_nd)
    return grad_x_nkd, grad_factor_k


def write_forward(x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
    """y_nkd = g_k X_k + w_k u in the dtype of X."""
    y_nkd = torch.empty_like(x_nkd)
    u_nd = u_nd.to(factor_k.dtype)
    for k in range(factor_k.shape[0]):
        x_nd = x_nkd[:, k].to(factor_k.dtype)
        if retention_k is not None:
            x_nd = x_nd * retention_k[k]
        y_nkd[:, k] = torch.addcmul(x_nd, u_nd, factor_k[k])
    return y_nkd


def write_backward(
    grad_y_nkd: Tensor,
    x_nkd: Tensor | None,
    u_nd: Tensor | None,
    factor_k: Tensor,
    retention_k: Tensor | None,
    u_dtype: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(g_k gY_k, sum_k w_k gY_k in u_dtype, sum_nd u gY_k, sum_nd X_k gY_k); None where the input of a term is."""
    grad_x_nkd = None
    if retention_k is not None:
        grad_x_nkd = torch.empty_like(grad_y_nkd)
        for k in range(factor_k.shape[0]):
            grad_x_nkd[:, k] = grad_y_nkd[:, k].to(factor_k.dtype) * retention_k[k]
    grad_u_nd = None if u_dtype is None else read_forward(grad_y_nkd, factor_k, u_dtype)
    grad_factor_k = None if u_nd is None else _stream_dots(grad_y_nkd, u_nd.to(factor_k.dtype))
    grad_retention_k = None
    if x_nkd is not None:
        grad_retention_k = torch.stack(
            [
                (x_nkd[:, k].to(factor_k.dtype) * grad_y_nkd[:, k]).sum(dtype=torch.float64)
                for k in range(factor_k.shape[0])
            ]
        )
    return grad_x_nkd, grad_u_nd, grad_factor_k, grad_retention_k


def _stream_dots(x_nkd: Tensor, v_nd: Tensor) -> Tensor:
    """[K] in fp64: sum over n and d of X_k * v."""
    return torch.stack([(x_nkd[:, k].to(v_nd.dtype) * v_nd).sum(dtype=torch.float64) for k in range(x_nkd.shape[1])])
