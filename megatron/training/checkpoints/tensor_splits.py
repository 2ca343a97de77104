"""How a tensor is divided among tensor-parallel ranks.

    split = Sectioned(0, ("F", "F"))                   # gate and up projection in one weight (SwiGLU)
    split.pieces(whole, 4, 1, sizes)                   # the views of whole that rank 1 of 4 holds, in their order
    shards = [split.shard(whole, 4, rank, sizes) for rank in range(4)]
    split.join(shards, sizes) == whole                 # bit-equal, for every split

What always holds: the shards joined are the whole, bit for bit; a tensor that cannot be divided evenly is a
ConversionError, never padded or cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.model_sizes import evaluate


def _slice(whole: Tensor, axis: int, parts: int, rank: int) -> Tensor:
    """Return the rank-th of `parts` equal views of whole along axis."""
    length = _shard_length(tuple(whole.shape), axis, parts)
    return whole.narrow(axis, rank * length, length)


def _shard_length(shape: Sequence[int], axis: int, parts: int) -> int:
    if shape[axis] % parts:
        raise ConversionError(
            f"a tensor of shape {list(shape)} cannot be divided among {parts} ranks: {shape[axis]} is no multiple of "
            f"{parts}"
        )
    return shape[axis] // parts


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    def pieces(self, whole: Tensor, parts: int, rank: int, sizes: Mapping[str, int]) -> list[Tensor]:
        """Return the views of whole that a rank holds, in their order."""
        return [whole]

    def shard(self, whole: Tensor, parts: int, rank: int, sizes: Mapping[str, int]) -> Tensor:
        """Return what a rank holds (a view)."""
        return whole

    def join(self, shards: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """Return the tensor that all ranks hold; ConversionError when they differ."""
        for rank, shard in enumerate(shards[1:], start=1):
            if not torch.equal(shard, shards[0]):
                raise ConversionError(f"rank {rank} holds another value than rank 0 of a tensor that all ranks share")
        return shards[0]

    def whole_shape(self, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from a shard's."""
        return tuple(shape)

    def shard_shape(self, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """Return a shard's shape, from the whole tensor's."""
        return tuple(shape)


@dataclass(frozen=True)
class Sharded:
    """Rank r of n holds the r-th of n equal slices along `axis`."""

    axis: int

    def pieces(self, whole: Tensor, parts: int, rank: int, sizes: Mapping[str, int]) -> list[Tensor]:
        """Return the views of whole that a rank holds, in their order along the axis."""
        return [_slice(whole, self.axis, parts, rank)]

    def shard(self, whole: Tensor, parts: int, rank: int, sizes: Mapping[str, int]) -> Tensor:
        """Return what a rank holds: a view where its pieces lie side by side, else a copy."""
        pieces = self.pieces(whole, parts, rank, sizes)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def join(self, shards: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """Return the whole tensor."""
        parts = len(shards)
        whole = torch.empty(self.whole_shape(shards[0].shape, parts), dtype=shards[0].dtype)
        for rank, shard in enumerate(shards):
            fill(self.pieces(whole, parts, rank, sizes), shard, self.axis)
        return whole

    def whole_shape(self, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from a shard's."""
        return (*shape[: self.axis], shape[self.axis] * parts, *shape[self.axis + 1 :])

    def shard_shape(self, shape: Sequence[int], parts: int) -> tuple[int, ...]:
        """Return a shard's shape, from the whole tensor's."""
        return (*shape[: self.axis], _shard_length(shape, self.axis, parts), *shape[self.axis + 1 :])


@dataclass(frozen=True)
class Sectioned(Sharded):
    """Several projections in one tensor, each of them sharded by itself: a rank holds a slice of every section.

    Args:
        axis: along which sections lie and are sliced.
        sections: the length of each, as an expression of model_sizes; equal ones need no sizes.
        keys: the names that torch_dist gives the sections, which it stores as tensors of their own; () when it stores
            the whole.
    """

    sections: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def lengths(self, total: int, sizes: Mapping[str, int]) -> list[int]:
        """Return the sections' lengths in a tensor that is `total` long along the axis."""
        if len(set(self.sections)) == 1:
            if total % len(self.sections):
                raise ConversionError(f"a length of {total} has no {len(self.sections)} equal sections")
            return [total // len(self.sections)] * len(self.sections)
        lengths = [evaluate(section, sizes) for section in self.sections]
        if sum(lengths) != total:
            raise ConversionError(
                f"sections of {'+'.join(map(str, lengths))} rows are wanted, the tensor has {total}: the stored "
                "arguments do not describe this checkpoint"
            )
        return lengths

    def pieces(self, whole: Tensor, parts: int, rank: int, sizes: Mapping[str, int]) -> list[Tensor]:
        """Return the views of whole that a rank holds, in their order along the axis."""
        if parts == 1:
            return [whole]
        sections = whole.split(self.lengths(whole.shape[self.axis], sizes), self.axis)
        return [_slice(section, self.axis, parts, rank) for section in sections]


def fill(pieces: Sequence[Tensor], shard: Tensor, axis: int) -> None:
    """Copy a rank's shard into its pieces of the whole tensor."""
    start = 0
    for piece in pieces:
        length = piece.shape[axis] if piece.dim() else 1
        piece.copy_(shard if len(pieces) == 1 else shard.narrow(axis, start, length))
        start += length


Split = Replicated | Sharded | Sectioned
