"""The replay block that --residual-stream-recompute-num-layers auto chooses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.stream_memory import BRANCHES_PER_LAYER, best_block_size, replay_peak


@given(st.integers(1, 96), st.integers(2, 16), st.integers(1, 4))
def test_best_block_is_the_least_of_all(num_layers: int, num_streams: int, chunks: int) -> None:
    best = best_block_size(num_layers, num_streams, chunks=chunks)
    peaks = [replay_peak(num_layers, num_streams, size, chunks=chunks) for size in range(1, num_layers + 1)]
    assert peaks[best - 1] == min(peaks)
    assert min(peaks) not in peaks[: best - 1]


@given(st.integers(24, 200), st.integers(2, 8))
def test_best_block_is_near_the_square_root_rule(num_layers: int, num_streams: int) -> None:
    branches = BRANCHES_PER_LAYER * num_layers
    rule = math.sqrt(num_streams * branches / (num_streams + 2)) / BRANCHES_PER_LAYER
    by_rule = replay_peak(num_layers, num_streams, max(1, round(rule)))
    best = replay_peak(num_layers, num_streams, best_block_size(num_layers, num_streams))
    assert best <= by_rule <= 1.15 * best


def test_a_block_of_one_layer_and_the_whole_stage_are_counted_by_hand() -> None:
    # 4 layers, K=4. Blocks of one: 4 ends of 4, and in a block 2 reads and norms (2 each) and one write.
    assert replay_peak(4, 4, 1) == 4 * 4 + 2 * 2 + 4
    # One block: one end, 8 reads and norms, 7 writes.
    assert replay_peak(4, 4, 4) == 4 + 2 * 8 + 7 * 4


def test_no_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_layers is 0"):
        best_block_size(0, 4)
