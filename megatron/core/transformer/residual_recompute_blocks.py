"""Where the replay blocks of a stack of layers end.

    block_ends(4, 3)                  # [False, False, True, True]: three layers, then one
    block_ends(4, 3, {0, 2})          # [False, True, False, True]: the pairs (0, 1) and (2, 3) stay whole

Used by the plan of a forward (residual_recompute.py) and by what predicts its memory (megatron/training/
stream_memory.py). What always holds: no torch; every layer is in one block, and no block splits a pair.
"""

from __future__ import annotations

from collections.abc import Collection


def block_ends(num_layers: int, block_size: int, pair_firsts: Collection[int] = ()) -> list[bool]:
    """Return for each layer whether a block ends there; no block ends on the first layer of a pair.

    Args:
        num_layers: of the stack.
        block_size: largest number of layers in a block; a pair that is longer makes a block of two.
        pair_firsts: zero-based indices of the layers that stay together with the one after them.
    """
    ends = [False] * num_layers
    start = 0
    while start < num_layers:
        end = min(start + block_size, num_layers) - 1
        if end in pair_firsts:
            # Shorten the block; when the pair is all there is in it, take the pair whole.
            end = end - 1 if end > start else end + 1
        ends[end] = True
        start = end + 1
    return ends
