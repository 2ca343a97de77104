"""The arithmetic of saved streams: by hand, the best replay block, micro-batches in flight."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.residual_recompute import build_residual_stream_recompute_plan
from megatron.training.stream_memory import (
    BRANCHES_PER_LAYER,
    StageLoad,
    StreamCosts,
    best_block_size,
    blocks_of,
    micro_batches_in_flight,
    replay_peak,
    replay_work,
)


def plain_costs(num_streams: int) -> StreamCosts:
    """Units of D: no bias, no dropout, one dtype of one byte, D=1."""
    return StreamCosts.of_layout(num_streams, 1, branch_itemsize=1, stream_itemsize=1)


stages = st.lists(st.builds(StageLoad, st.integers(1, 96), st.integers(1, 8)), min_size=1, max_size=4)


@given(stages, st.integers(2, 16))
@settings(deadline=None)
def test_best_block_is_the_least_of_all(loads: list[StageLoad], num_streams: int) -> None:
    costs = plain_costs(num_streams)
    best = best_block_size(loads, costs)
    largest = max(load.num_layers for load in loads)
    peaks = [max(replay_peak(load, costs, size) for load in loads) for size in range(1, largest + 1)]
    assert peaks[best - 1] == min(peaks)
    assert min(peaks) not in peaks[: best - 1]


@given(st.integers(24, 200), st.integers(2, 8))
@settings(deadline=None)
def test_best_block_is_near_the_square_root_rule(num_layers: int, num_streams: int) -> None:
    costs, stage = plain_costs(num_streams), StageLoad(num_layers)
    branches = BRANCHES_PER_LAYER * num_layers
    rule = math.sqrt(num_streams * branches / (num_streams + 2)) / BRANCHES_PER_LAYER
    by_rule = replay_peak(stage, costs, max(1, round(rule)))
    best = replay_peak(stage, costs, best_block_size([stage], costs))
    assert best <= by_rule <= 1.15 * best


def test_more_micro_batches_in_flight_want_larger_blocks() -> None:
    costs = plain_costs(4)
    sizes = [best_block_size([StageLoad(24, in_flight)], costs) for in_flight in (1, 4, 16)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_a_block_of_one_layer_and_the_whole_stage_are_counted_by_hand() -> None:
    # 4 layers, K=4. Blocks of one: 4 streams of 4, and in a block 2 reads and norms (2 each); nothing saves the write.
    assert replay_peak(StageLoad(4), plain_costs(4), 1) == 4 * 4 + 2 * 2
    # One block: one stream, 8 reads and norms, 6 saved writes. Two in flight keep another stream.
    assert replay_peak(StageLoad(4), plain_costs(4), 4) == 4 + 2 * 8 + 6 * 4
    assert replay_peak(StageLoad(4, in_flight=2), plain_costs(4), 4) == 2 * 4 + 2 * 8 + 6 * 4


def test_a_layer_is_counted_by_hand() -> None:
    costs = plain_costs(4)
    # An ordinary layer of 16 D: each branch adds the stream and the update that the write saves.
    assert costs.eager_layer(16) == 16 + 2 * (4 + 1) - 4  # nothing saves the stream between the branches
    # Under replay the norms' inputs and outputs go and the updates stay, so that nothing is added.
    assert costs.replayed_layer(16) == 16 - 2 * 2 + 2
    # bf16 branches beside an fp32 stream, a bias and a mask of one byte for each element: the norm reads 2 bytes
    # instead of 4, the write saves an update of 4.
    mixed = StreamCosts.of_layout(3, 10, branch_itemsize=2, stream_itemsize=4, has_bias=True, mask_bytes=10)
    assert mixed.eager_layer(0) == 2 * (120 + 40 + 20 - 40) - 120
    assert mixed.replayed_layer(0) == -2 * (40 + 10)
    assert mixed.block == 120 + 40 - 20 + 10
    assert mixed.rebuilt(1) == 2 * (20 + 20) + 10 + 40


def test_a_norm_that_is_part_of_its_read_saves_its_statistics_alone() -> None:
    # bf16, D = 10: the ordinary norm saves 20 + 8 bytes, the fused one 8, and nothing saves or rebuilds what was read.
    options: dict[str, Any] = {"branch_itemsize": 2, "stream_itemsize": 2, "norm_bytes": 28}
    apart, fused = (StreamCosts.of_layout(4, 10, **options, fused_norm_bytes=saved) for saved in (None, 8))
    assert apart.eager_layer(0) - fused.eager_layer(0) == 2 * 20
    assert apart.rebuilt(3) - fused.rebuilt(3) == 6 * 20
    assert apart.replayed_layer(0) == fused.replayed_layer(0)
    moved = [replay_work(StageLoad(2), 2, costs, 10).bytes_moved for costs in (apart, fused)]
    assert moved[0] - moved[1] == 4 * 2 * 20, "the norm reads nothing and writes what the read wrote"


def test_replayed_work_is_counted_by_hand() -> None:
    # Two layers in one block, K=4: 4 reads (K + 1), 4 norms (2) and 3 writes (2K + 1).
    work = replay_work(StageLoad(2), 2, plain_costs(4), 1)
    assert work.bytes_moved == 4 * 5 + 4 * 2 + 3 * 9
    assert work.flops == 4 * (7 + 8) + 3 * 8
    # Blocks of one layer replay one write each.
    assert replay_work(StageLoad(2), 1, plain_costs(4), 1).bytes_moved == 4 * 5 + 4 * 2 + 2 * 9


def test_blocks_are_those_of_the_plan() -> None:
    def sizes(num_layers: int, block_size: int) -> list[int]:
        return [block.layers for block in blocks_of(StageLoad(num_layers), block_size)]

    assert sizes(5, 2) == [2, 2, 1]
    assert sizes(4, 9) == [4]
    assert sizes(0, 2) == []


@given(st.integers(1, 24), st.integers(1, 9), st.sets(st.integers(0, 22)))
@settings(deadline=None)
def test_blocks_with_shortcut_pairs_are_those_of_the_plan(num_layers: int, size: int, drawn: set[int]) -> None:
    firsts = [first for first in drawn if first + 1 < num_layers and first - 1 not in drawn]
    pairs = tuple((first, first + 1) for first in firsts)
    plan = build_residual_stream_recompute_plan(num_layers, size, atomic_layer_pairs=pairs)
    blocks = blocks_of(StageLoad(num_layers, pairs=pairs), size)
    assert list(accumulate(block.layers for block in blocks)) == [
        layer + 1 for layer, context in enumerate(plan) if context.is_block_end
    ]
    assert sum(block.pairs for block in blocks) == len(pairs), "a pair is in no block, or in two"


def test_a_shortcut_pair_is_counted_by_hand() -> None:
    # K=4, one branch a layer: blocks of two for N=1, each with 3 reads and norms (2 each) and one rebuilt write (4).
    costs = StreamCosts.of_layout(4, 1, branch_itemsize=1, stream_itemsize=1, branches_per_layer=1)
    chunk = StageLoad(4, in_flight=3, pairs=((0, 1), (2, 3)))
    assert replay_peak(chunk, costs, 1) == 3 * 2 * 4 + 3 * 2 + 4
    assert replay_peak(StageLoad(4, 3), costs, 1) == 3 * 4 * 4 + 2
    # The third norm finds its stream saved in the ordinary model; the wide one saves what it read, and replay neither
    # that nor its output.
    assert costs.eager_shortcut == 1
    assert costs.replayed_shortcut == -1
    assert replay_work(chunk, 1, costs, 1).bytes_moved == 2 * (3 * 5 + 3 * 2 + 9)


@pytest.mark.parametrize(
    ("arguments", "options", "wanted"),
    [
        ((0, 1, 8), {}, 1),
        ((0, 4, 8), {}, 4),
        ((3, 4, 8), {}, 1),
        ((0, 4, 2), {}, 2),
        ((0, 4, 8), {"chunks": 2}, 2 * 3 + 4 + 1),
        ((3, 4, 8), {"chunks": 2}, 4 + 1),
        ((0, 4, 8), {"chunks": 2, "group_size": 6}, 2 * 3 + 6 + 1),
        ((0, 4, 4), {"chunks": 2}, 8),
    ],
)
def test_micro_batches_in_flight(arguments: tuple[int, int, int], options: dict[str, int], wanted: int) -> None:
    assert micro_batches_in_flight(*arguments, **options) == wanted


def test_no_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match="num_layers of 1 or more"):
        best_block_size([StageLoad(0)], plain_costs(4))
