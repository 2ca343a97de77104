"""Tile sizes of the Triton kernels of the streamwise operators.

Forward kernels are autotuned over FORWARD_CONFIGS, per D, K, dtypes and kind of write, once for few tokens and once for
many; Triton keeps the choices with its compiled kernels (TRITON_CACHE_DIR), so that later processes do not try again.
Any choice gives the same bits, because no sum crosses elements. Backward kernels sum over a tile, in an order that
depends on its size: `backward_tile` fixes it by D alone, so that a resumed run and every rank give the same bits. So
does `norm_tile` for all kernels with a norm, whose sums over a row are the forward's too.

Names: BN and BD, tokens and columns of a tile.
"""

from __future__ import annotations

from typing import Any

import triton

MANY_ELEMENTS = 1 << 22
"""Elements of z from which a call counts as one of many tokens."""

_BACKWARD_ELEMENTS, _BACKWARD_WARPS = 1024, 4  # 8 elements a thread: one 16-byte access in bf16

MAX_NORM_WIDTH = 8192
"""The widest row that kernels with a norm hold whole in registers."""

NORM_STEPS = 16
"""Tiles that one program of a norm's backward goes through, adding up the gradients of the weights."""

FORWARD_CONFIGS = [
    triton.Config({"BN": rows, "BD": columns}, num_warps=warps)
    for columns in (256, 512, 1024, 2048)
    for rows, warps in ((1, 4), (2, 4), (4, 8), (1, 8))
    if 1024 <= rows * columns <= 4096
] + [triton.Config({"BN": rows, "BD": 64}, num_warps=4) for rows in (8, 16)]


def prune_forward(configs: list[triton.Config], arguments: dict[str, Any], **constants: Any) -> list[triton.Config]:
    """Leave out tiles that are mostly outside a row; one is left under the interpreter, which measures nothing."""
    width = triton.next_power_of_2({**arguments, **constants}["D"])
    fitting = [config for config in configs if config.kwargs["BD"] <= max(width, 64)]
    return fitting[-1:] if triton.knobs.runtime.interpret else fitting


def backward_tile(width: int) -> dict[str, int]:
    """BN, BD and the warps of a backward kernel for rows of `width` columns."""
    columns = min(triton.next_power_of_2(width), 1024)
    return {"BN": max(1, _BACKWARD_ELEMENTS // columns), "BD": columns, "num_warps": _BACKWARD_WARPS}


def norm_tile(width: int) -> dict[str, int]:
    """BN, BD and the warps of a kernel with a norm: whole rows of `width` columns, padded to a power of two."""
    columns = triton.next_power_of_2(width)
    rows = max(1, _BACKWARD_ELEMENTS // columns)
    return {"BN": rows, "BD": columns, "num_warps": min(16, max(_BACKWARD_WARPS, columns // 512))}
