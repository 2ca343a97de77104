"""Tensors are copied between the files of two layouts as PyTorch would cut and join them, byte for byte."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.checkpoints.checkpoint_state import TensorInfo
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.stored_rows import FileChunk, StoredRows, axis_runs, copy_rows, covers, positions
from megatron.training.checkpoints.tensor_splits import Replicated, Sectioned, Sharded, Split

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def as_file(path: Path, pieces: list[torch.Tensor], gap: int) -> list[int]:
    """Write tensors one after another, `gap` bytes before each; returns where each begins."""
    offsets = []
    with path.open("wb") as file:
        for piece in pieces:
            file.write(b"\xff" * gap)
            offsets.append(file.tell())
            file.write(piece.contiguous().view(torch.uint8).numpy().tobytes())
    return offsets


def chunks_of(split: Split, info: TensorInfo, axis: int, parts: int, path: Path, offsets: list[int]) -> list[FileChunk]:
    descriptor = os.open(path, os.O_RDWR)
    along = positions(info.shape, axis)
    return [
        FileChunk(str(path), descriptor, offset, axis_runs(split.pieces(along, parts, rank, {})))
        for rank, offset in enumerate(offsets)
    ]


def splits(axis: int) -> list[Split]:
    return [Sharded(axis), Sectioned(axis, ("F", "F")), Replicated()]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_layout_becomes_another_one_as_torch_would_make_it(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3), "dimensions")
    axis = data.draw(st.integers(0, rank - 1), "axis")
    shape = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    shape[axis] = 8 * data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(DTYPES))
    info = TensorInfo(tuple(shape), dtype)
    whole = torch.randn(shape, dtype=torch.float64).to(dtype)
    before, after = data.draw(st.sampled_from(splits(axis)[:2])), data.draw(st.sampled_from(splits(axis)))
    have, want = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.sampled_from((1, 2, 4)))
    gap = data.draw(st.integers(0, 9))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        shards = [before.shard(whole, have, rank, {}) for rank in range(have)]
        wanted = [after.shard(whole, want, rank, {}) for rank in range(want)]
        sources = chunks_of(before, info, axis, have, source, as_file(source, shards, gap))
        targets = chunks_of(
            after, info, axis, want, target, as_file(target, [torch.zeros_like(t) for t in wanted], gap)
        )
        assert covers(sources, shape[axis])
        copy_rows(StoredRows(info, axis, tuple(sources)), targets)
        as_file(source, wanted, gap)
        for descriptor in {chunk.descriptor for chunk in (*sources, *targets)}:
            os.close(descriptor)
        assert target.read_bytes() == source.read_bytes()


def test_blocks_smaller_than_the_tensor_are_copied_whole(tmp_path: Path) -> None:
    """Above one block of 1 MiB, split along the last axis."""
    whole = torch.randn(1501, 512)
    info = TensorInfo((1501, 512), torch.float32)
    source, target = tmp_path / "source", tmp_path / "target"
    sources = chunks_of(Sharded(1), info, 1, 1, source, as_file(source, [whole], 3))
    shards = [Sharded(1).shard(whole, 4, rank, {}) for rank in range(4)]
    targets = chunks_of(Sharded(1), info, 1, 4, target, as_file(target, [torch.zeros_like(s) for s in shards], 3))
    copy_rows(StoredRows(info, 1, tuple(sources)), targets)
    as_file(source, shards, 3)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_source_that_was_cut_off_is_an_error(axis: int, tmp_path: Path) -> None:
    whole = torch.randn(64, 64)
    info = TensorInfo((64, 64), torch.float32)
    source, target = tmp_path / "source", tmp_path / "target"
    sources = chunks_of(Sharded(axis), info, axis, 1, source, as_file(source, [whole], 0))
    os.truncate(source, 64 * 64 * 4 - 1)
    targets = chunks_of(Sharded(axis), info, axis, 2, target, as_file(target, [whole[:32], whole[32:]], 0))
    with pytest.raises(ConversionError, match="it has been cut off"):
        copy_rows(StoredRows(info, axis, tuple(sources)), targets)


def test_chunks_with_a_hole_or_an_overlap_do_not_cover() -> None:
    def chunk(*runs: tuple[int, int]) -> FileChunk:
        return FileChunk("file", 0, 0, runs)

    assert covers([chunk((4, 4)), chunk((0, 2), (2, 2))], 8)
    assert not covers([chunk((0, 3)), chunk((4, 4))], 8)
    assert not covers([chunk((0, 5)), chunk((4, 4))], 8)
    assert not covers([chunk((0, 8))], 9)
