"""What every launch of a streamwise Triton kernel needs: rows, constants, and the sums behind a backward.

    rows = Rows(z)
    read_forward[rows.forward_grid](*rows.of(x), ..., rows.count, rows.inner, **rows.shape(read))
    gradient_p = finish(folded(partial)[0], read)

Used by streamwise_triton_operators and streamwise_triton_norm_operators. What always holds: any strides with contiguous
rows are taken as they are, others are made contiguous; sums have an order that shapes alone decide.

Names: n tokens, k streams, d branch width, p padded controller.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions import streamwise_triton_parts as parts
from megatron.core.fusions.streamwise_triton_configs import MANY_ELEMENTS, backward_tile
from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseUpdate

MAX_STREAMS = 16

KINDS = {
    "factor": parts.FACTOR.value,
    "read": parts.READ.value,
    "write": parts.WRITE.value,
    "retention": parts.RETENTION.value,
}
DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_FINISH_BLOCK, _FOLD_BLOCK = 1024, 4096


class Rows:
    """The rows of one call: how many there are, and how a kernel finds them in each tensor.

    A leading shape of up to two dimensions is [outer, inner] for every tensor, so that any strides will do; a longer
    one is taken as one dimension of contiguous rows.
    """

    def __init__(self, narrow: Tensor, columns: int | None = None) -> None:
        self._leading = narrow.shape[:-1]
        self.columns = narrow.shape[-1] if columns is None else columns
        self.count = math.prod(self._leading)
        self.inner = self._leading[-1] if len(self._leading) == 2 else 1
        self.many = self.count * self.columns >= MANY_ELEMENTS
        self.tile = backward_tile(self.columns)
        self.backward_grid = (
            triton.cdiv(self.count, self.tile["BN"]),
            triton.cdiv(self.columns, self.tile["BD"]),
        )
        self.tiles = self.backward_grid[0] * self.backward_grid[1]

    def forward_grid(self, constants: dict[str, Any]) -> tuple[int, int]:
        """The grid of a forward kernel with the tile in `constants`."""
        return triton.cdiv(self.count, constants["BN"]), triton.cdiv(self.columns, constants["BD"])

    def of(self, x: Tensor) -> tuple[Tensor, int, int]:
        """(tensor, stride of outer, stride of inner)."""
        if x.stride(-1) != 1 or len(self._leading) > 2:
            x = x.contiguous()
        if len(self._leading) == 2:
            return x, x.stride(0), x.stride(1)
        if len(self._leading) == 1:
            return x, x.stride(0), 0
        return x, x.shape[-1], 0

    def shape(self, controller: Controller) -> dict[str, Any]:
        """Constants that every kernel takes."""
        return {"D": self.columns, "K": controller.num_streams, "ACC": DTYPES[controller.sum_dtype]}

    def partial(self, controller: Controller, controllers: int) -> Tensor:
        """Room for the first level of sums: [controllers, K, tiles]."""
        shape = (controllers, controller.num_streams, self.tiles)
        return torch.empty(shape, dtype=controller.sum_dtype, device=controller.values_p.device)


def check_streams(controller: Controller) -> None:
    if controller.num_streams > MAX_STREAMS:
        raise ValueError(
            f"the Triton kernels serve up to {MAX_STREAMS} streams, got {controller.num_streams}: set "
            "MEGATRON_STREAMWISE_BACKEND=eager."
        )


def values_of(
    write: Controller, retention: Controller | None, read: Controller | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The three vectors of a write; any one stands in for one that is not there and not looked at."""
    return (
        write.values_p,
        write.values_p if retention is None else retention.values_p,
        write.values_p if read is None else read.values_p,
    )


def write_constants(
    update: StreamwiseUpdate, write: Controller, retention: Controller | None, read: Controller | None
) -> dict[str, Any]:
    """Constants of both write kernels."""
    dropout = update.dropout if update.seed is not None else 0.0
    return {
        "WRITE_KIND": KINDS[write.kind],
        "RETENTION_KIND": KINDS["factor" if retention is None else retention.kind],
        "READ_KIND": KINDS["factor" if read is None else read.kind],
        "MAX_FORGET": 0.0 if retention is None else retention.max_forget,
        "HAS_RETENTION": retention is not None,
        "HAS_READ": read is not None,
        "HAS_BIAS": update.bias_d is not None,
        "THRESHOLD": round(dropout * 2**32),
        "SCALE": 1.0 / (1.0 - dropout) if dropout < 1 else 0.0,
    }


def folded(partial_ckt: Tensor) -> Tensor:
    """Sums of many tiles added in blocks, so that no program of the last level has many to add; few as they are."""
    *rows, tiles = partial_ckt.shape
    if tiles <= _FOLD_BLOCK:
        return partial_ckt
    blocks = triton.cdiv(tiles, _FOLD_BLOCK)
    folded_ckt = torch.empty((*rows, blocks), dtype=torch.float64, device=partial_ckt.device)
    parts.fold_sums[(math.prod(rows), blocks)](partial_ckt, folded_ckt, tiles, blocks, BLOCK=_FOLD_BLOCK)
    return folded_ckt


def finish(partial_kt: Tensor, controller: Controller) -> Tensor:
    """The gradient of a controller from the sums of its tiles."""
    gradient_p = torch.empty_like(controller.values_p, memory_format=torch.contiguous_format)
    parts.finish_sums[(controller.num_streams + 1,)](
        partial_kt,
        partial_kt.shape[1],
        controller.values_p,
        gradient_p,
        gradient_p.shape[0],
        K=controller.num_streams,
        KIND=KINDS[controller.kind],
        SLOPE_SCALE=1.0 if controller.kind == "factor" else controller.slope_scale,
        BLOCK=_FINISH_BLOCK,
    )
    return gradient_p
