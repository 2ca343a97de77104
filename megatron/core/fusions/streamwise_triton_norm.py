"""Triton kernels of a read, or a write and the read after it, with the RMSNorm or LayerNorm behind the read.

    n = w zhat (+ b),   zhat = (z - mean) scale      of z rounded to its dtype; an RMSNorm has no mean and no b
    gZ = scale (w gN - mean(w gN) - zhat mean(w gN zhat)),   the first mean for a LayerNorm alone

A program holds whole rows, D columns padded to a power of two. The forward keeps mean and scale of a row; the backward
computes z again from the streams that it loads anyway. There, a program goes through STEPS tiles, adds up the gradients
of w and b in registers and stores them once; `sum_programs` adds the programs. Launched by
streamwise_triton_norm_operators. Parts and what always holds: streamwise_triton_parts.

Names: n tokens, k streams; X, Y and their gradients have K*D columns, u, z and n have D; `inner`, `*_outer`, `*_inner`:
a tensor's rows are those of [outer, inner, columns] with these strides.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals, as in Triton's own examples)

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.fusions.streamwise_triton_parts import row_offsets
from megatron.core.fusions.streamwise_triton_read import mix, read_gradients
from megatron.core.fusions.streamwise_triton_write import load_update, mix_written, write_gradients, write_streams


@triton.jit
def row_sums(tile):
    """Sum of each row of a tile."""
    return tl.reduce(tile, 1, tl.standard._sum_combine)


@triton.jit
def store_normed(
    z,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    scale_ptr,
    rows,
    columns,
    n,
    D: tl.constexpr,
    EPS: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
):
    """Norm a tile of z, zero outside its rows, and store it with its statistics."""
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    z = z.to(out_ptr.dtype.element_ty).to(ACC)
    if IS_LAYER_NORM:
        mean = row_sums(z) / D
        tl.store(mean_ptr + rows, mean, mask=rows < n)
        z = tl.where(mask, z - mean[:, None], 0)
    scale = 1.0 / tl.sqrt(row_sums(z * z) / D + EPS)
    tl.store(scale_ptr + rows, scale, mask=rows < n)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0).to(ACC)
    out = z * scale[:, None] * weight[None, :]
    if IS_LAYER_NORM:
        out += tl.load(bias_ptr + columns, mask=columns < D, other=0).to(ACC)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_gradients(
    z,
    grad,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    rows,
    columns,
    n,
    D: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
):
    """(gZ, gN zhat) of a tile, from z as it was normed and gN; both zero outside the rows."""
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    scale = tl.load(scale_ptr + rows, mask=rows < n, other=0)[:, None]
    if IS_LAYER_NORM:
        z = tl.where(mask, z - tl.load(mean_ptr + rows, mask=rows < n, other=0)[:, None], 0)
    zhat = z * scale
    scaled = grad * tl.load(weight_ptr + columns, mask=columns < D, other=0).to(ACC)[None, :]
    rest = scaled - zhat * (row_sums(scaled * zhat) / D)[:, None]
    if IS_LAYER_NORM:
        rest = tl.where(mask, rest - (row_sums(scaled) / D)[:, None], 0)
    return rest * scale, grad * zhat


@triton.jit(do_not_specialize=["n", "inner"])
def read_norm_forward(
    x_ptr,
    x_outer,
    x_inner,
    read_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    scale_ptr,
    n,
    inner,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    EPS: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """BN rows of norm(z), contiguous."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BD)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
    z = mix(x_ptrs, read_ptr, mask, D, K, READ_KIND, ACC, BN, BD)
    store_normed(z, weight_ptr, bias_ptr, out_ptr, mean_ptr, scale_ptr, rows, columns, n, D, EPS, IS_LAYER_NORM, ACC)


@triton.jit(do_not_specialize=["n", "inner", "tiles"])
def read_norm_backward(
    grad_ptr,
    grad_outer,
    grad_inner,
    x_ptr,
    x_outer,
    x_inner,
    read_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    through_ptr,
    grad_x_ptr,
    partial_ptr,
    norm_partial_ptr,
    n,
    inner,
    tiles,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    THROUGH: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
    STEPS: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """STEPS tiles of dX, their sums for partial [K, tiles], and the program's for norm_partial [programs, 2, D]."""
    columns = tl.arange(0, BD)
    sum_weight = tl.full((BD,), 0, ACC)
    sum_bias = tl.full((BD,), 0, ACC)
    for step in range(STEPS):
        tile = tl.program_id(0) * STEPS + step
        rows = tile * BN + tl.arange(0, BN)
        mask = (rows < n)[:, None] & (columns < D)[None, :]
        grad_ptrs = grad_ptr + row_offsets(rows, inner, grad_outer, grad_inner)[:, None] + columns[None, :]
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(ACC)
        x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
        z = mix(x_ptrs, read_ptr, mask, D, K, READ_KIND, ACC, BN, BD).to(grad_ptr.dtype.element_ty).to(ACC)
        grad_z, products = norm_gradients(
            z, grad, weight_ptr, mean_ptr, scale_ptr, rows, columns, n, D, IS_LAYER_NORM, ACC
        )
        sum_weight += tl.reduce(products, 0, tl.standard._sum_combine)
        sum_bias += tl.reduce(grad, 0, tl.standard._sum_combine)
        of_stream = rows.to(tl.int64)[:, None] * (K * D) + columns[None, :]
        read_gradients(
            grad_z,
            x_ptrs,
            read_ptr,
            through_ptr + of_stream,
            grad_x_ptr + of_stream,
            partial_ptr + tile,
            tiles,
            mask,
            D,
            K,
            READ_KIND,
            True,
            True,
            THROUGH,
            ACC,
        )
    store_sums(norm_partial_ptr, sum_weight, sum_bias, columns, D, IS_LAYER_NORM)


@triton.jit
def store_sums(norm_partial_ptr, sum_weight, sum_bias, columns, D: tl.constexpr, IS_LAYER_NORM: tl.constexpr):
    """Store a program's sums; an RMSNorm has no bias, and its second row is left as it is."""
    norm_partial_ptr += tl.program_id(0).to(tl.int64) * (2 * D) + columns
    tl.store(norm_partial_ptr, sum_weight, mask=columns < D)
    if IS_LAYER_NORM:
        tl.store(norm_partial_ptr + D, sum_bias, mask=columns < D)


@triton.jit(do_not_specialize=["programs"])
def sum_programs(
    norm_partial_ptr, result_ptr, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """result [WIDTH] in fp64: the sum over the programs of partial [programs, WIDTH], COLUMNS of it."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.full((ROWS, COLUMNS), 0, tl.float64)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < programs)[:, None] & (columns < WIDTH)[None, :]
        pointers = norm_partial_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        sums += tl.load(pointers, mask=mask, other=0).to(tl.float64)
    tl.store(result_ptr + columns, tl.reduce(sums, 0, tl.standard._sum_combine), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["n", "inner"])
def write_read_norm_forward(
    x_ptr,
    x_outer,
    x_inner,
    u_ptr,
    u_outer,
    u_inner,
    update_bias_ptr,
    seed_ptr,
    write_ptr,
    retention_ptr,
    read_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    out_ptr,
    mean_ptr,
    scale_ptr,
    n,
    inner,
    D: tl.constexpr,
    K: tl.constexpr,
    WRITE_KIND: tl.constexpr,
    RETENTION_KIND: tl.constexpr,
    READ_KIND: tl.constexpr,
    MAX_FORGET: tl.constexpr,
    HAS_RETENTION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """BN rows of Y and of norm(z), both contiguous."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BD)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    u_ptrs = u_ptr + row_offsets(rows, inner, u_outer, u_inner)[:, None] + columns[None, :]
    v = load_update(u_ptrs, update_bias_ptr, seed_ptr, rows, columns, mask, D, HAS_BIAS, THRESHOLD, SCALE, ACC)
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
        True,
        ACC,
        BN,
        BD,
    )
    store_normed(z, weight_ptr, bias_ptr, out_ptr, mean_ptr, scale_ptr, rows, columns, n, D, EPS, IS_LAYER_NORM, ACC)


@triton.jit(do_not_specialize=["n", "inner", "tiles"])
def write_read_norm_backward(
    grad_y_ptr,
    grad_y_outer,
    grad_y_inner,
    grad_ptr,
    grad_outer,
    grad_inner,
    x_ptr,
    x_outer,
    x_inner,
    u_ptr,
    u_outer,
    u_inner,
    update_bias_ptr,
    seed_ptr,
    write_ptr,
    retention_ptr,
    read_ptr,
    weight_ptr,
    mean_ptr,
    scale_ptr,
    grad_x_ptr,
    grad_u_ptr,
    partial_ptr,
    norm_partial_ptr,
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
    HAS_BIAS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    ACC: tl.constexpr,
    STEPS: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """STEPS tiles of dX and du, their sums for partial [3, K, tiles], and the program's for norm_partial."""
    columns = tl.arange(0, BD)
    sum_weight = tl.full((BD,), 0, ACC)
    sum_bias = tl.full((BD,), 0, ACC)
    for step in range(STEPS):
        tile = tl.program_id(0) * STEPS + step
        rows = tile * BN + tl.arange(0, BN)
        mask = (rows < n)[:, None] & (columns < D)[None, :]
        u_ptrs = u_ptr + row_offsets(rows, inner, u_outer, u_inner)[:, None] + columns[None, :]
        v = load_update(u_ptrs, update_bias_ptr, seed_ptr, rows, columns, mask, D, HAS_BIAS, THRESHOLD, SCALE, ACC)
        x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
        z = mix_written(
            x_ptrs,
            v,
            write_ptr,
            retention_ptr,
            read_ptr,
            mask,
            D,
            K,
            WRITE_KIND,
            RETENTION_KIND,
            READ_KIND,
            MAX_FORGET,
            HAS_RETENTION,
            ACC,
            BN,
            BD,
        )
        grad_ptrs = grad_ptr + row_offsets(rows, inner, grad_outer, grad_inner)[:, None] + columns[None, :]
        grad = tl.load(grad_ptrs, mask=mask, other=0).to(ACC)
        z = z.to(grad_ptr.dtype.element_ty).to(ACC)
        grad_z, products = norm_gradients(
            z, grad, weight_ptr, mean_ptr, scale_ptr, rows, columns, n, D, IS_LAYER_NORM, ACC
        )
        sum_weight += tl.reduce(products, 0, tl.standard._sum_combine)
        sum_bias += tl.reduce(grad, 0, tl.standard._sum_combine)
        grad_y_ptrs = grad_y_ptr + row_offsets(rows, inner, grad_y_outer, grad_y_inner)[:, None] + columns[None, :]
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
            True,
            THRESHOLD,
            SCALE,
            True,
            True,
            True,
            HAS_RETENTION,
            ACC,
            BN,
            BD,
        )
    store_sums(norm_partial_ptr, sum_weight, sum_bias, columns, D, IS_LAYER_NORM)
