"""Triton kernels of the streamwise read: z = sum_k f_k X_k, and its gradients.

Launched by streamwise_triton_operators. Parts and what always holds: streamwise_triton_parts.

Names: n tokens, k streams; X has K*D columns, z has D; `inner`, `*_outer`, `*_inner`: a tensor's rows are those of
[outer, inner, columns] with these strides.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals, as in Triton's own examples)

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.fusions.streamwise_triton_configs import FORWARD_CONFIGS, prune_forward
from megatron.core.fusions.streamwise_triton_parts import factor_of, push, row_offsets, sum_all, total


@triton.jit
def mix(
    x_ptrs,
    read_ptr,
    mask,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """A tile of z in ACC; zero outside the mask."""
    a0 = tl.full((BN, BD), 0, ACC)
    a1, a2, a3 = a0, a0, a0
    for k in tl.static_range(K):
        x = tl.load(x_ptrs + k * D, mask=mask, other=0).to(ACC)
        a0, a1, a2, a3 = push(k, factor_of(read_ptr, k, READ_KIND, 0.0, ACC) * x, a0, a1, a2, a3)
    return total(K, a0, a1, a2, a3)


@triton.jit
def read_gradients(
    grad_z,
    x_ptrs,
    read_ptr,
    through_ptrs,
    grad_x_ptrs,
    partial_ptr,
    tiles,
    mask,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_READ: tl.constexpr,
    THROUGH: tl.constexpr,
    ACC: tl.constexpr,
):
    """Store dX_k = f_k gZ of a tile, and its sums of X_k gZ for its place in partial [K, tiles].

    With THROUGH the rounded dX_k is added to another gradient of X, which has the layout of dX. Launch it without
    fused multiply-adds, so that this gives the bits of an addition of its own.
    """
    for k in tl.static_range(K):
        if WANTS_X:
            grad_x = (factor_of(read_ptr, k, READ_KIND, 0.0, ACC) * grad_z).to(grad_x_ptrs.dtype.element_ty)
            if THROUGH:
                through = tl.load(through_ptrs + k * D, mask=mask, other=0).to(ACC)
                grad_x = (through + grad_x.to(ACC)).to(grad_x_ptrs.dtype.element_ty)
            tl.store(grad_x_ptrs + k * D, grad_x, mask=mask)
        if WANTS_READ:
            x = tl.load(x_ptrs + k * D, mask=mask, other=0).to(ACC)
            tl.store(partial_ptr + k * tiles.to(tl.int64), sum_all(x * grad_z))


@triton.autotune(
    FORWARD_CONFIGS, key=["D", "K", "MANY"], prune_configs_by={"early_config_prune": prune_forward}, cache_results=True
)
@triton.jit(do_not_specialize=["n", "inner"])
def read_forward(
    x_ptr,
    x_outer,
    x_inner,
    read_ptr,
    z_ptr,
    n,
    inner,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    ACC: tl.constexpr,
    MANY: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """One tile of z. z is contiguous."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
    z = mix(x_ptrs, read_ptr, mask, D, K, READ_KIND, ACC, BN, BD)
    tl.store(z_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], z.to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n", "inner", "tiles"])
def read_backward(
    grad_z_ptr,
    grad_z_outer,
    grad_z_inner,
    x_ptr,
    x_outer,
    x_inner,
    read_ptr,
    through_ptr,
    grad_x_ptr,
    partial_ptr,
    n,
    inner,
    tiles,
    D: tl.constexpr,
    K: tl.constexpr,
    READ_KIND: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_READ: tl.constexpr,
    THROUGH: tl.constexpr,
    ACC: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """One tile of dX_k = f_k gZ, and its sums of X_k gZ for partial [K, tiles]. dX and `through` are contiguous."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    mask = (rows < n)[:, None] & (columns < D)[None, :]
    grad_z_ptrs = grad_z_ptr + row_offsets(rows, inner, grad_z_outer, grad_z_inner)[:, None] + columns[None, :]
    grad_z = tl.load(grad_z_ptrs, mask=mask, other=0).to(ACC)
    x_ptrs = x_ptr + row_offsets(rows, inner, x_outer, x_inner)[:, None] + columns[None, :]
    of_stream = rows.to(tl.int64)[:, None] * (K * D) + columns[None, :]
    partial_ptr += tile
    read_gradients(
        grad_z,
        x_ptrs,
        read_ptr,
        through_ptr + of_stream,
        grad_x_ptr + of_stream,
        partial_ptr,
        tiles,
        mask,
        D,
        K,
        READ_KIND,
        WANTS_X,
        WANTS_READ,
        THROUGH,
        ACC,
    )
