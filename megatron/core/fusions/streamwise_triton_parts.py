"""Parts of the streamwise Triton kernels: addressing, factors, sums, dropout, gradients of controllers.

Used by streamwise_triton_read and streamwise_triton_write; chosen by MEGATRON_STREAMWISE_BACKEND
(megatron.core.transformer.streamwise_residual_backends). Compiled on GPUs; on CPU tensors through Triton's interpreter,
when TRITON_INTERPRET=1 is set before this module is imported.

What always holds:
- A tile is [BN tokens, BD columns] of every stream. Sums over streams are taken in pairs, so that 2, 4, 8... equal
  streams read by 1/K give the stream exactly.
- Sums over tokens have two levels: one number per tile and stream, then one program per stream, in fp64, with one more
  level between them where tiles are many. No atomics; the order depends on shapes alone, so repeated calls give the
  same bits.
- Token counts are never specialized on: no batch size compiles anything again.
- Only builtins of triton.language and functions of this file are called: those of triton.language.standard are made
  when triton is first imported, possibly before the interpreter was asked for.

Names: n tokens, k streams, p length of a padded controller; BN and BD sizes of a tile; ACC dtype of sums.
"""
# ruff: noqa: N803  (constants of a kernel are written in capitals, as in Triton's own examples)

from __future__ import annotations

import triton
import triton.language as tl

FACTOR, READ, WRITE, RETENTION = (tl.constexpr(kind) for kind in range(4))
"""How a controller's value becomes a factor: f = v, sigmoid(v), 2 sigmoid(v), 1 - F sigmoid(-v)."""


@triton.jit
def sum_all(tile):
    """Sum of a [BN, BD] tile."""
    return tl.reduce(tl.reduce(tile, 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)


@triton.jit
def row_offsets(rows, inner, stride_outer, stride_inner):
    """Offsets, in elements, of the rows of a [outer, inner, columns] tensor; rows count over outer * inner."""
    outer = rows // inner
    return outer.to(tl.int64) * stride_outer + (rows - outer * inner).to(tl.int64) * stride_inner


@triton.jit
def factor_of(values_ptr, k, KIND: tl.constexpr, MAX_FORGET: tl.constexpr, ACC: tl.constexpr):
    """The factor of stream k: computed in fp64, rounded once to the controller's dtype, widened to ACC."""
    value = tl.load(values_ptr + k)
    wide = value.to(tl.float64)
    if KIND == READ:
        wide = 1.0 / (1.0 + tl.exp(-wide))
    elif KIND == WRITE:
        wide = 2.0 / (1.0 + tl.exp(-wide))
    elif KIND == RETENTION:
        wide = 1.0 - MAX_FORGET / (1.0 + tl.exp(wide))
    return wide.to(values_ptr.dtype.element_ty).to(ACC)


@triton.jit
def push(k: tl.constexpr, term, a0, a1, a2, a3):
    """Add the term of stream k to a sum in pairs: a0 waits for one stream's partner, a1 for two's, a2 for four's..."""
    if k % 2 == 0:
        a0 = term
    else:
        term = a0 + term
        if k % 4 == 1:
            a1 = term
        else:
            term = a1 + term
            if k % 8 == 3:
                a2 = term
            else:
                term = a2 + term
                if k % 16 == 7:
                    a3 = term
                else:
                    a0 = a3 + term
    return a0, a1, a2, a3


@triton.jit
def total(K: tl.constexpr, a0, a1, a2, a3):
    """The sum of K pushed terms, 1 <= K <= 16."""
    result = a0
    if K % 4 == 2:
        result = a1
    elif K % 4 == 3:
        result = a1 + a0
    if K % 8 == 4:
        result = a2
    elif K % 8 > 4:
        result = a2 + result
    if K == 8:
        result = a3
    elif K > 8 and K < 16:
        result = a3 + result
    return result


@triton.jit
def kept_by_dropout(seed_ptr, index, THRESHOLD: tl.constexpr):
    """Whether elements are kept: a random 32-bit number per 64-bit index is at least THRESHOLD.

    Philox 4x32 with 10 rounds (Salmon et al. 2011), key = seed, counter = index: the same in every kernel and on every
    device.
    """
    seed = tl.load(seed_ptr).to(tl.uint64)
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    wide = index.to(tl.uint64)
    c0 = (wide & 0xFFFFFFFF).to(tl.uint32)
    c1 = (wide >> 32).to(tl.uint32)
    c2 = tl.full(index.shape, 0, tl.uint32)
    c3 = tl.full(index.shape, 0, tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = (product1 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (product0 & 0xFFFFFFFF).to(tl.uint32)
        key0 = ((key0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        key1 = ((key1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return c0.to(tl.int64) >= THRESHOLD


@triton.jit(do_not_specialize=["tiles", "folded"])
def fold_sums(partial_ptr, folded_ptr, tiles, folded, BLOCK: tl.constexpr):
    """[rows, tiles] sums to [rows, folded] in fp64: program (row, block) adds BLOCK neighbours."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(partial_ptr + row * tiles + index, mask=index < tiles, other=0).to(tl.float64)
    tl.store(folded_ptr + row * folded + tl.program_id(1), tl.reduce(sums, 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["tiles", "padded"])
def finish_sums(
    partial_ptr,
    tiles,
    values_ptr,
    gradient_ptr,
    padded,
    K: tl.constexpr,
    KIND: tl.constexpr,
    SLOPE_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a controller from [K, tiles] sums: program k < K makes element k, program K the zeros behind them."""
    k = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if k == K:
        for start in range(K, padded, BLOCK):
            index = start + columns
            zeros = tl.full((BLOCK,), 0, gradient_ptr.dtype.element_ty)
            tl.store(gradient_ptr + index, zeros, mask=index < padded)
    else:
        sums = tl.full((BLOCK,), 0, tl.float64)
        row_ptr = partial_ptr + k.to(tl.int64) * tiles
        for start in range(0, tiles, BLOCK):
            index = start + columns
            sums += tl.load(row_ptr + index, mask=index < tiles, other=0).to(tl.float64)
        gradient = tl.reduce(sums, 0, tl.standard._sum_combine)
        if KIND != FACTOR:
            sigmoid = 1.0 / (1.0 + tl.exp(-tl.load(values_ptr + k).to(tl.float64)))
            gradient = gradient * (SLOPE_SCALE * (sigmoid * (1.0 - sigmoid)))
        tl.store(gradient_ptr + k, gradient.to(gradient_ptr.dtype.element_ty))
