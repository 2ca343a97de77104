"""How much memory the residual stream of a wide model keeps, and the replay block that keeps the least.

    best_block_size(num_layers=12, num_streams=4)        # layers in a block

In units of D features per token. A stage keeps K at the end of each replay block; while the backward is in a block of n
branches it holds, besides, what replay rebuilds there: the reads and the norms' outputs (2 each) and all writes but the
last (K each). The first falls with the size of a block, the second grows; they meet near sqrt(K*B/(K+2)) branches a
block, B branches on the stage. Branch internals and branch outputs are kept either way and do not enter.

What always holds: pure arithmetic, no torch.
"""

from __future__ import annotations

BRANCHES_PER_LAYER = 2  # attention and MLP


def replay_peak(num_layers: int, num_streams: int, block_size: int, *, chunks: int = 1) -> int:
    """Return the most that is held at once, in units of D per token, for blocks of block_size layers.

    num_layers are those of one model chunk; chunks is the number of model chunks of the pipeline stage.
    """
    blocks = -(-num_layers // block_size)
    branches = min(block_size, num_layers) * BRANCHES_PER_LAYER
    return chunks * blocks * num_streams + 2 * branches + (branches - 1) * num_streams


def best_block_size(num_layers: int, num_streams: int, *, chunks: int = 1) -> int:
    """Return the number of layers in a replay block that holds the least; the smaller one of equals.

    Raises:
        ValueError: no layers.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; 1 or more is wanted")
    return min(
        range(1, num_layers + 1), key=lambda size: (replay_peak(num_layers, num_streams, size, chunks=chunks), size)
    )
