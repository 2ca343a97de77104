"""How weights lie in Megatron's tensors and in those of `transformers`: pairs of functions that undo each other.

    qkv = fuse_qkv(q, k, v, groups=8)            # rows of Megatron's linear_qkv
    q, k, v = split_qkv(qkv, groups=8)           # bit-equal

What always holds: each function only moves elements (or adds and removes zeros); values and dtypes are untouched, and
`split(fuse(x)) == x`, `strip(pad(x)) == x` bit for bit. Works on weights (rows, columns) and on biases (rows).

Shape letters: h query heads, g query groups, c channels of a head, v vocabulary, f feed-forward width, k streams.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fuse_qkv(q: Tensor, k: Tensor, v: Tensor, *, groups: int) -> Tensor:
    """Return linear_qkv's rows: of every query group its queries, then its key, then its value.

    Args:
        q: [h*c, ...]; heads of one group are neighbours, as in transformers' repeat_kv.
        k, v: [g*c, ...].
        groups: g.

    Raises:
        ValueError: rows that do not divide into the groups, or k and v of different shapes.
    """
    if k.shape != v.shape or q.shape[0] % groups or k.shape[0] % groups or q.shape[0] % k.shape[0]:
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not divide into {groups} "
            "query groups"
        )
    parts = [part.unflatten(0, (groups, part.shape[0] // groups)) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(qkv: Tensor, *, groups: int, head_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [h*c, ...], k and v [g*c, ...] of linear_qkv's rows [(h + 2g)*c, ...]: the inverse of fuse_qkv.

    Raises:
        ValueError: rows that do not divide into the groups.
    """
    if qkv.shape[0] % groups:
        raise ValueError(f"{qkv.shape[0]} rows do not divide into {groups} query groups")
    grouped = qkv.unflatten(0, (groups, qkv.shape[0] // groups))
    queries = grouped.shape[1] - 2 * head_channels
    if queries <= 0 or queries % head_channels:
        raise ValueError(
            f"{grouped.shape[1]} rows of a query group are no whole number of heads of {head_channels} channels, one "
            "query or more, a key and a value"
        )
    q, k, v = grouped.split([queries, head_channels, head_channels], dim=1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def fuse_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Return linear_fc1's rows of a SwiGLU: the gate's [f, ...], then the other half's [f, ...].

    Raises:
        ValueError: halves of different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"the halves of a SwiGLU have shapes {tuple(gate.shape)} and {tuple(up.shape)}")
    return torch.cat((gate, up))


def split_gate_up(fused: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up, each [f, ...], of linear_fc1's rows [2f, ...].

    Raises:
        ValueError: an odd number of rows.
    """
    if fused.shape[0] % 2:
        raise ValueError(f"{fused.shape[0]} rows are not the two halves of a SwiGLU")
    gate, up = fused.chunk(2)
    return gate, up


def pad_rows(table: Tensor, rows: int) -> Tensor:
    """Return table with zero rows added up to `rows` (a vocabulary's padding, a controller's tail).

    Raises:
        ValueError: table already has more rows.
    """
    if table.shape[0] > rows:
        raise ValueError(f"{table.shape[0]} rows do not fit into {rows}")
    if table.shape[0] == rows:
        return table
    return torch.cat((table, table.new_zeros(rows - table.shape[0], *table.shape[1:])))


def strip_rows(table: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows of table.

    Raises:
        ValueError: table has fewer rows.
    """
    if table.shape[0] < rows:
        raise ValueError(f"{rows} rows are wanted of a table that has {table.shape[0]}")
    return table[:rows]
