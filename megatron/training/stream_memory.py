"""How much memory the residual stream of a wide model keeps, and the replay block that holds the least.

    costs = StreamCosts.of_layout(num_streams=4, width=512, branch_itemsize=2, stream_itemsize=2)
    best_block_size([StageLoad(num_layers=12)], costs)        # layers in a block

Every branch of a wide model saves its stream (K*D) and the update that it wrote (D); its norm saves the read (D) where
an ordinary one saves the stream, and one or two numbers where it is part of the read. The stream between the two
branches of a layer is an exception: one operation writes it and reads it, and its backward computes it again, so it is
saved only with learned retention, by the second branch's write. With replay a block saves the stream at its start and
each branch's update, and what the norms and the dropout masks kept goes too. While the backward is in a block of n
branches it holds, besides, what replay rebuilds there: n norms' outputs (D each), n reads (D each, where norms are not
part of them, and what the norm saves) and n-1 writes (K*D each). What is saved falls with the size of a block, what is
rebuilt grows; they meet near sqrt(K*B/(K+1)) branches a block, B branches on the stage (K+2 where norms are not part of
reads). What attention and MLP keep inside does not depend on the block.

A layer of a hybrid stack has one branch, so that no operation writes a stream and reads it. A pair of shortcut MoE has
three reads and two writes: the routed experts read the stream that the layer ahead of them reads too, which is kept
once, and their norm's output goes under replay; their own update is part of the MoE layer's.

A stage of a pipeline keeps several micro-batches at once (`micro_batches_in_flight`) and rebuilds one block at a time.

What always holds: pure arithmetic, no torch; bytes are per token of this rank and per micro-batch unless said
otherwise; what a stage holds is an upper bound that takes every block for a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.transformer.residual_recompute_blocks import block_ends

BRANCHES_PER_LAYER = 2  # attention and MLP

_NORM_FLOPS = 8  # per element: mean, variance, normalisation, scale and shift


@dataclass(frozen=True)
class StreamCosts:
    """Bytes per token of the tensors around one branch.

    Args:
        num_streams: K.
        stream: the carried stream, K*D.
        narrow: one stream in the stream's dtype, D.
        branch: a branch's input, normalised input or update in the branch's dtype, D.
        update: what a write saves of its update: the update itself, or the one with bias and dropout.
        new_update: whether that is a tensor of its own.
        mask: what dropout of the update saves.
        norm: what a norm saves, its input included where it saves it.
        norm_input: that input; 0 where it is not saved.
        fused_norm: what it saves where it is part of the read of a branch; None where it is not.
        bare_read: a branch's input where the norm does not save it, else 0.
        branches_per_layer: 2 for a Transformer layer.
        unsaved: the streams of a layer that nothing saves.
    """

    num_streams: int
    stream: int
    narrow: int
    branch: int
    update: int
    new_update: bool = False
    mask: int = 0
    norm: int = 0
    norm_input: int = 0
    fused_norm: int | None = None
    bare_read: int = 0
    branches_per_layer: int = BRANCHES_PER_LAYER
    unsaved: int = 0

    @classmethod
    def of_layout(
        cls,
        num_streams: int,
        width: int,
        *,
        branch_itemsize: int,
        stream_itemsize: int,
        has_bias: bool = False,
        mask_bytes: int = 0,
        norm_bytes: int | None = None,
        norm_saves_input: bool = True,
        fused_norm_bytes: int | None = None,
        branches_per_layer: int = BRANCHES_PER_LAYER,
        learned_retention: bool = False,
    ) -> StreamCosts:
        """Return the costs of K streams of width D; norm_bytes is by default that of a norm that saves its input only.

        has_bias means that a bias is added to updates before they are written, mask_bytes above 0 that they are dropped
        out.
        """
        narrow, branch = width * stream_itemsize, width * branch_itemsize
        new_update = has_bias or mask_bytes > 0
        return cls(
            num_streams,
            stream=num_streams * narrow,
            narrow=narrow,
            branch=branch,
            update=narrow if new_update else branch,
            new_update=new_update,
            mask=mask_bytes,
            norm=branch if norm_bytes is None else norm_bytes,
            norm_input=branch if norm_saves_input else 0,
            fused_norm=fused_norm_bytes,
            bare_read=0 if norm_saves_input or fused_norm_bytes is not None else branch,
            branches_per_layer=branches_per_layer,
            unsaved=0 if learned_retention else (branches_per_layer - 1) * num_streams * narrow,
        )

    def eager_layer(self, ordinary_layer: int) -> int:
        """Bytes that a wide layer keeps without replay, of those that the ordinary layer keeps."""
        # The norm saves the read, in the branch's dtype, instead of the stream, or its statistics alone.
        saved = self.branches_per_layer * (self.stream + self.update + self.branch_norm - self.norm_of_stream)
        return ordinary_layer + saved - self.unsaved

    def replayed_layer(self, ordinary_layer: int) -> int:
        """Bytes that a layer keeps under replay, without its block's share, of those that the ordinary layer keeps."""
        # Gone: what the norm saves, its output, the mask. Come: the branch's update.
        return ordinary_layer - self.branches_per_layer * (self.norm_of_stream + self.mask)

    @property
    def eager_shortcut(self) -> int:
        """Bytes that the third read of a pair keeps without replay, over those of its norm in the ordinary model."""
        return self.branch_norm - self.second_norm

    @property
    def replayed_shortcut(self) -> int:
        """The same with replay: what its norm saves is gone, and its output."""
        return -self.second_norm - self.branch

    @property
    def second_norm(self) -> int:
        """Bytes that a second norm of one stream saves: the stream is there already."""
        return self.norm - self.norm_input

    @property
    def branch_norm(self) -> int:
        """Bytes that the norm of a wide branch saves."""
        return self.norm if self.fused_norm is None else self.fused_norm

    @property
    def norm_of_stream(self) -> int:
        """Bytes that a norm of one stream saves, as the ordinary model's do."""
        return self.norm + self.narrow - self.branch

    @property
    def block(self) -> int:
        """Bytes that a replay block keeps besides its layers: its first stream, and what its last write saves."""
        return self.stream + self.update - self.branch + self.mask

    def rebuilt(self, layers: int, pairs: int = 0) -> int:
        """Bytes that the backward rebuilds in a block of so many layers, so many pairs of shortcut MoE among them."""
        branches = layers * self.branches_per_layer
        read = self.branch_norm + self.bare_read + self.branch
        write = self.stream + self.mask + (self.update if self.new_update else 0)
        reads = branches + pairs
        return reads * read + (branches - 1) * write - self.unsaved  # the last layer's; others are kept by replay

    @property
    def ordinary_head(self) -> int:
        """Bytes that the final norm keeps in the ordinary model."""
        return self.norm_of_stream

    @property
    def wide_head(self) -> int:
        """Bytes that the readout and the final norm keep."""
        return self.stream + self.norm


@dataclass(frozen=True)
class StageLoad:
    """A model chunk of a pipeline stage: its layers, the stage's forwards of a chunk in flight, and the local indices
    (layer, MoE layer) of its pairs of shortcut MoE, which no replay block splits."""

    num_layers: int
    in_flight: int = 1
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Block:
    """A replay block: its layers, and the pairs of shortcut MoE among them."""

    layers: int
    pairs: int = 0


@dataclass(frozen=True)
class ReplayWork:
    """What replay computes a second time, per token and micro-batch: floating-point operations and bytes moved."""

    flops: int
    bytes_moved: int


def blocks_of(chunk: StageLoad, block_size: int) -> list[Block]:
    """Return the replay blocks of a model chunk, in order."""
    firsts = {first for first, _ in chunk.pairs}
    blocks, start = [], 0
    for layer, is_end in enumerate(block_ends(chunk.num_layers, block_size, firsts)):
        if is_end:
            blocks.append(Block(layer + 1 - start, sum(start <= first <= layer for first in firsts)))
            start = layer + 1
    return blocks


def most_rebuilt(chunk: StageLoad, costs: StreamCosts, block_size: int) -> int:
    """Return the bytes per token that the backward rebuilds in the largest block of a model chunk."""
    blocks = blocks_of(chunk, block_size)
    return max((costs.rebuilt(block.layers, block.pairs) for block in blocks), default=0)


def replay_work(chunk: StageLoad, block_size: int, costs: StreamCosts, width: int) -> ReplayWork:
    """Return the extra work of replay in one model chunk."""
    flops = bytes_moved = 0
    for block in blocks_of(chunk, block_size):
        branches = block.layers * costs.branches_per_layer
        reads, writes = branches + block.pairs, branches - 1
        bytes_moved += reads * (costs.stream + (3 if costs.fused_norm is None else 1) * costs.branch)
        bytes_moved += writes * (2 * costs.stream + costs.branch + (2 * costs.update if costs.new_update else 0))
        flops += reads * (2 * costs.num_streams - 1 + _NORM_FLOPS) * width
        flops += writes * (2 * costs.num_streams + (2 if costs.new_update else 0)) * width
    return ReplayWork(flops, bytes_moved)


def replay_peak(chunk: StageLoad, costs: StreamCosts, block_size: int) -> int:
    """Return what the streams make a stage of such chunks hold at most with replay in blocks of block_size layers,
    bytes per token.

    The blocks of all forwards in flight, and one rebuilt block. What does not depend on block_size is left out.
    """
    kept = chunk.in_flight * len(blocks_of(chunk, block_size)) * costs.block
    return kept + most_rebuilt(chunk, costs, block_size)


def best_block_size(stages: Sequence[StageLoad], costs: StreamCosts) -> int:
    """Return the layers in a replay block with which the stage whose streams hold the most holds the least; of equals
    the smaller one. A stage of several chunks stands in stages once for each.

    Raises:
        ValueError: no stage with a layer.
    """
    stages = [stage for stage in stages if stage.num_layers > 0]
    if not stages:
        raise ValueError("no pipeline stage has a layer; num_layers of 1 or more is wanted")
    sizes = range(1, max(stage.num_layers for stage in stages) + 1)
    return min(sizes, key=lambda size: (max(replay_peak(stage, costs, size) for stage in stages), size))


def micro_batches_in_flight(
    stage: int, stages: int, num_micro_batches: int, *, chunks: int = 1, group_size: int | None = None
) -> int:
    """Return how many forwards of a model chunk a pipeline stage keeps at once: 1F1B, or interleaved with chunks > 1.

    group_size: micro-batches that the interleaved schedule runs through a chunk before the next one, by default the
    number of stages.
    """
    if stages == 1:
        return 1
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * (group_size or stages)
    return min(ahead + 1, num_micro_batches * chunks)
