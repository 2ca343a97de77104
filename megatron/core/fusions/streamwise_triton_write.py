"""Triton kernels of the streamwise write, alone or with the read of the next branch, and their gradients.

    Y_k = g_k X_k + w_k v      with v = dropout(u + bias), g_k = 1 without retention
    z   = sum_k r_k Y_k        of Y as it is stored

Launched by streamwise_triton_operators. Parts and what always holds: streamwise_triton_parts. The backward forms v and
Y again, with the same mask.

Names: n tokens, k streams; X, Y and their gradients have K*D columns, u and z have D; `inner`, `*_outer`, `*_inner`: a
tensor's rows are those of [outer, inner, columns] with these strides.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals, as in Triton's own examples)

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.fusions.streamwise_triton_configs import FORWARD_CONFIGS, prune_forward
from megatron.core.fusions.streamwise_triton_parts import (
    factor_of,
    kept_by_dropout,
    push,
    row_offsets,
    sum_all,
    total,
)


@triton.jit
def load_update(
    u_ptrs,
    bias_ptr,
    seed_ptr,
    rows,
    columns,
    mask,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
):
    """A tile of v = dropout(u + bias) in ACC; zero outside the mask."""
    v = tl.load(u_ptrs, mask=mask, other=0).to(ACC)
    if HAS_BIAS:
        v += tl.load(bias_ptr + columns, mask=columns < D, other=0).to(ACC)[None, :]
        v = tl.where(mask, v, 0)
    return drop(v, seed_ptr, rows, columns, D, THRESHOLD, SCALE)


@triton.jit
def drop(v, seed_ptr, rows, columns, D: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr):
    """The tile with dropped elements zero and the others scaled; also the gradient of that."""
    if THRESHOLD > 0:
        kept = kept_by_dropout(seed_ptr, rows.to(tl.int64)[:, None] * D + columns[None, :], THRESHOLD)
        v = tl.where(kept, v * SCALE, 0)
    return v


@triton.jit
def written(
    x,
    v,
    k,
    write_ptr,
    retention_ptr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    ACC: tl.constexpr,
):
    """A tile of Y_k in ACC, before it is rounded."""
    if HAS_RETENTION:
        x = factor_of(retention_ptr, k, RETENTION_KIND, MAX_FORGET, ACC) * x
    return x + factor_of(write_ptr, k, WRITE_KIND, 0.0, ACC) * v


@triton.jit
def write_streams(
    x_ptrs,
    v,
    write_ptr,
    retention_ptr,
    read_ptr,
    y_ptrs,
    mask,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    HAS_READ: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Store a tile of Y; returns that of z in ACC, zero outside the mask and without HAS_READ."""
    a0 = tl.full((BN, BD), 0, ACC)
    a1, a2, a3 = a0, a0, a0
    for k in tl.static_range(K):
        x = tl.load(x_ptrs + k * D, mask=mask, other=0).to(ACC)
        y = written(x, v, k, write_ptr, retention_ptr, WRITE_KIND, RETENTION_KIND, MAX_FORGET, HAS_RETENTION, ACC).to(
            y_ptrs.dtype.element_ty
        )
        tl.store(y_ptrs + k * D, y, mask=mask)
        if HAS_READ:
            a0, a1, a2, a3 = push(k, factor_of(read_ptr, k, READ_KIND, 0.0, ACC) * y.to(ACC), a0, a1, a2, a3)
    return total(K, a0, a1, a2, a3)


@triton.jit
def mix_written(
    x_ptrs,
    v,
    write_ptr,
    retention_ptr,
    read_ptr,
    mask,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """The tile of z that write_streams returned, from X and v again."""
    a0 = tl.full((BN, BD), 0, ACC)
    a1, a2, a3 = a0, a0, a0
    for k in tl.static_range(K):
        x = tl.load(x_ptrs + k * D, mask=mask, other=0)
        y = written(
            x.to(ACC), v, k, write_ptr, retention_ptr, WRITE_KIND, RETENTION_KIND, MAX_FORGET, HAS_RETENTION, ACC
        ).to(x.dtype)
        a0, a1, a2, a3 = push(k, factor_of(read_ptr, k, READ_KIND, 0.0, ACC) * y.to(ACC), a0, a1, a2, a3)
    return total(K, a0, a1, a2, a3)


_FORWARD_KEY = ["D", "K", "MANY", "HAS_RETENTION", "HAS_READ", "HAS_BIAS", "THRESHOLD"]


@triton.autotune(
    FORWARD_CONFIGS, key=_FORWARD_KEY, prune_configs_by={"early_config_prune": prune_forward}, cache_results=True
)
@triton.jit(do_not_specialize=["n", "inner"])
def write_forward(
    x_ptr,
    x_outer,
    x_inner,
    u_ptr,
    u_outer,
    u_inner,
    bias_ptr,
    seed_ptr,
    write_ptr,
    retention_ptr,
    read_ptr,
    y_ptr,
    z_ptr,
    n,
    inner,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    HAS_READ: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ACC: tl.constexpr,
    MANY: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """One tile of Y, and of z with HAS_READ. Y and z are contiguous."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    u_ptrs = u_ptr + row_offsets(rows, inner, u_outer, u_inner)[:, None] + columns[None, :]
    v = load_update(u_ptrs, bias_ptr, seed_ptr, rows, columns, mask, D, HAS_BIAS, THRESHOLD, SCALE, ACC)
    x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * (K * D) + columns[None, :]
    z = write_streams(
        x_ptrs,
        v,
        write_ptr,
        retention_ptr,
        read_ptr,
        y_ptrs,
        mask,
        D,
        K,
        WRITE_KIND,
        RETENTION_KIND,
        READ_KIND,
        MAX_FORGET,
        HAS_RETENTION,
        HAS_READ,
        ACC,
        BN,
        BD,
    )
    if HAS_READ:
        tl.store(z_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_gradients(
    grad_y_ptrs,
    grad_z,
    x_ptrs,
    v,
    seed_ptr,
    write_ptr,
    retention_ptr,
    read_ptr,
    grad_x_ptr,
    grad_u_ptr,
    partial_ptr,
    tiles,
    rows,
    columns,
    mask,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    HAS_READ: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_U: tl.constexpr,
    WANTS_WRITE: tl.constexpr,
    WANTS_RETENTION: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Store a tile of the gradients, with T_k = gY_k, or gY_k + r_k gZ with HAS_READ.

    dX_k = g_k T_k, du = the gradient of dropout of sum_k w_k T_k; the tile's place in partial [3, K, tiles] takes the
    sums of v T_k, X_k T_k and Y_k gZ. v and gZ are looked at only where they are needed.
    """
    grad_x_ptrs = grad_x_ptr + rows.to(tl.int64)[:, None] * (K * D) + columns[None, :]
    stride = tiles.to(tl.int64)
    a0 = tl.full((BN, BD), 0, ACC)
    a1, a2, a3 = a0, a0, a0
    for k in tl.static_range(K):
        grad = tl.load(grad_y_ptrs + k * D, mask=mask, other=0).to(ACC)
        write = factor_of(write_ptr, k, WRITE_KIND, 0.0, ACC)
        if WANTS_RETENTION or HAS_READ:
            x = tl.load(x_ptrs + k * D, mask=mask, other=0).to(ACC)
        if HAS_READ:
            y = written(x, v, k, write_ptr, retention_ptr, WRITE_KIND, RETENTION_KIND, MAX_FORGET, HAS_RETENTION, ACC)
            y = y.to(x_ptrs.dtype.element_ty).to(ACC)
            tl.store(partial_ptr + (2 * K + k) * stride, sum_all(y * grad_z))
            grad += factor_of(read_ptr, k, READ_KIND, 0.0, ACC) * grad_z
        if WANTS_X:
            grad_x = grad
            if HAS_RETENTION:
                grad_x = factor_of(retention_ptr, k, RETENTION_KIND, MAX_FORGET, ACC) * grad
            tl.store(grad_x_ptrs + k * D, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        if WANTS_WRITE:
            tl.store(partial_ptr + k * stride, sum_all(v * grad))
        if WANTS_RETENTION:
            tl.store(partial_ptr + (K + k) * stride, sum_all(x * grad))
        if WANTS_U:
            a0, a1, a2, a3 = push(k, write * grad, a0, a1, a2, a3)
    if WANTS_U:
        grad_v = drop(total(K, a0, a1, a2, a3), seed_ptr, rows, columns, D, THRESHOLD, SCALE)
        grad_u_ptrs = grad_u_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(grad_u_ptrs, grad_v.to(grad_u_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "inner", "tiles"])
def write_backward(
    grad_y_ptr,
    grad_y_outer,
    grad_y_inner,
    grad_z_ptr,
    grad_z_outer,
    grad_z_inner,
    x_ptr,
    x_outer,
    x_inner,
    u_ptr,
    u_outer,
    u_inner,
    bias_ptr,
    seed_ptr,
    write_ptr,
    retention_ptr,
    read_ptr,
    grad_x_ptr,
    grad_u_ptr,
    partial_ptr,
    n,
    inner,
    tiles,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    HAS_READ: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_U: tl.constexpr,
    WANTS_WRITE: tl.constexpr,
    WANTS_RETENTION: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """One tile of the gradients, as write_gradients has them."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    grad_y_ptrs = grad_y_ptr + row_offsets(rows, inner, grad_y_outer, grad_y_inner)[:, None] + columns[None, :]
    x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
    grad_z = tl.full((BN, BD), 0, ACC)
    v = grad_z
    if HAS_READ:
        grad_z_ptrs = grad_z_ptr + row_offsets(rows, inner, grad_z_outer, grad_z_inner)[:, None] + columns[None, :]
        grad_z = tl.load(grad_z_ptrs, mask=mask, other=0).to(ACC)
    if WANTS_WRITE or HAS_READ:
        u_ptrs = u_ptr + row_offsets(rows, inner, u_outer, u_inner)[:, None] + columns[None, :]
        v = load_update(u_ptrs, bias_ptr, seed_ptr, rows, columns, mask, D, HAS_BIAS, THRESHOLD, SCALE, ACC)
    write_gradients(
        grad_y_ptrs,
        grad_z,
        x_ptrs,
        v,
        seed_ptr,
        write_ptr,
        retention_ptr,
        read_ptr,
        grad_x_ptr,
        grad_u_ptr,
        partial_ptr + tile,
        tiles,
        rows,
        columns,
        mask,
        D,
        K,
        WRITE_KIND,
        RETENTION_KIND,
        READ_KIND,
        MAX_FORGET,
        HAS_RETENTION,
        HAS_READ,
        THRESHOLD,
        SCALE,
        WANTS_X,
        WANTS_U,
        WANTS_WRITE,
        WANTS_RETENTION,
        ACC,
        BN,
        BD,
    )
