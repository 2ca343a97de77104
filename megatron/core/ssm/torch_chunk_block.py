"""One block of chunks of Mamba-2's scan: what forward and backward both compute from the inputs.

    for span in inputs.spans():
        block = ScanBlock(span, inputs)
        before, state = block.pass_states(state)
        y = block.from_states(before) + block.within_chunks()

The mathematics and its source stand in torch_chunk_scan, the only user of this module.

What always holds: everything here is in the accumulation dtype; a block's scores [b, c, h, q, q] are bounded whatever
the length; heads of a group share its B and C without a copy.

Tensor names: b batch, l length, h heads, p head dimension, g groups, r heads per group, n state dimension, c chunks of
a block, q positions of a chunk (t the later, s the earlier one of a pair), a a_h the decay rates A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.ssm.torch_accumulation import accumulation_dtype

# Elements of one block's scores [b, c, h, q, q]: what fits in a CPU's second-level cache, and what a GPU may hold.
_SCORES_PER_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}


def _decay(log_decay: Tensor) -> Tensor:
    """exp, in place, with zero for what is negligible: numbers near the smallest would slow products down tenfold."""
    negligible = -600.0 if log_decay.dtype == torch.float64 else -60.0
    return torch.threshold_(log_decay, negligible, -torch.inf).exp_()


@dataclass(frozen=True)
class Span:
    """A block of `chunks` chunks of `size` tokens that begins at token `start`."""

    start: int
    chunks: int
    size: int

    def cut(self, tensor_bl: Tensor) -> Tensor:
        """[b, l, ...] -> [b, c, q, ...], a view."""
        return tensor_bl.narrow(1, self.start, self.chunks * self.size).unflatten(1, (self.chunks, self.size))


def chunks_at_once(batch: int, heads: int, chunk_size: int, device_type: str) -> int:
    """How many whole chunks make a block."""
    scores_per_chunk = max(1, batch * heads * chunk_size**2)
    return max(1, _SCORES_PER_BLOCK.get(device_type, 1 << 26) // scores_per_chunk)


def _spans(length: int, chunk_size: int, at_once: int) -> Iterator[Span]:
    """Whole chunks in blocks, then the rest as one shorter chunk."""
    whole, rest = divmod(length, chunk_size)
    for first in range(0, whole, at_once):
        yield Span(first * chunk_size, min(at_once, whole - first), chunk_size)
    if rest:
        yield Span(whole * chunk_size, 1, rest)


def grouped(tensor_bcqhp: Tensor, groups: int) -> Tensor:
    """[b, c, q, h, p] -> [b, c, g, q, r*p], a view."""
    return tensor_bcqhp.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)


def ungrouped(tensor_bcgqw: Tensor, heads: int) -> Tensor:
    """[b, c, g, q, r*p] -> [b, c, q, h, p], a view."""
    tensor_bcqgw = tensor_bcgqw.transpose(2, 3)
    return tensor_bcqgw.unflatten(4, (heads // tensor_bcqgw.shape[3], -1)).flatten(3, 4)


def head_major(tensor_bcqhp: Tensor) -> Tensor:
    """[b, c, q, h, p] -> contiguous [b, c, h, q, p]."""
    return tensor_bcqhp.transpose(2, 3).contiguous()


class ScanBlock:
    """One block's inputs in the accumulation dtype, and what forward and backward both derive from them."""

    def __init__(self, span: Span, inputs: ScanInputs) -> None:
        wide = inputs.wide
        self.span = span
        self.heads = inputs.x.shape[2]
        self.groups = inputs.b.shape[2]
        self.x_bcqhp = span.cut(inputs.x).to(wide)
        self.dt_bcqh = span.cut(inputs.dt).to(wide)
        self.b_bcgqn = span.cut(inputs.b).to(wide).transpose(2, 3)
        self.c_bcgqn = span.cut(inputs.c).to(wide).transpose(2, 3)
        self.log_decay_bcqh = (self.dt_bcqh * inputs.a.to(wide)).cumsum(2)
        last_bch = self.log_decay_bcqh[:, :, -1]
        self.from_state_bcqh = _decay(self.log_decay_bcqh.clone())
        self.to_state_bcqh = _decay(last_bch.unsqueeze(2) - self.log_decay_bcqh)
        self.across_bch = _decay(last_bch.clone())
        self.skip_h = inputs.skip_per_head()
        self.same_sequence_bcts: Tensor | None = None
        if inputs.seq_idx is not None:
            self._keep_sequences_apart(inputs.seq_idx)

    def _keep_sequences_apart(self, seq_idx_bl: Tensor) -> None:
        index_bcq = self.span.cut(seq_idx_bl)
        before = max(self.span.start - 1, 0)  # the initial states belong to the first token's sequence
        previous_bc = torch.cat([seq_idx_bl[:, before, None], index_bcq[:, :-1, -1]], dim=1)
        last_bc = index_bcq[:, :, -1]
        self.same_sequence_bcts = index_bcq.unsqueeze(3) == index_bcq.unsqueeze(2)
        self.from_state_bcqh *= (index_bcq == previous_bc.unsqueeze(2)).unsqueeze(3)
        self.to_state_bcqh *= (index_bcq == last_bc.unsqueeze(2)).unsqueeze(3)
        self.across_bch = self.across_bch * (last_bc == previous_bc).unsqueeze(2)

    @cached_property
    def decay_bchts(self) -> Tensor:
        """exp of the decay from s to t; above the diagonal whatever it happens to be."""
        log_decay_bchq = self.log_decay_bcqh.transpose(2, 3).contiguous()
        return _decay(log_decay_bchq.unsqueeze(4) - log_decay_bchq.unsqueeze(3))

    @cached_property
    def similarity_bcgts(self) -> Tensor:
        """C_t . B_s, of one group."""
        similarity = self.c_bcgqn @ self.b_bcgqn.transpose(3, 4)
        if self.same_sequence_bcts is not None:
            similarity.mul_(self.same_sequence_bcts.unsqueeze(2))
        return similarity

    @cached_property
    def dt_bchs(self) -> Tensor:
        """The step size, head by head."""
        return self.dt_bcqh.transpose(2, 3).contiguous()

    @cached_property
    def x_bchqp(self) -> Tensor:
        """x, head by head."""
        return head_major(self.x_bcqhp)

    def times_similarity(self, tensor_bchts: Tensor) -> Tensor:
        """A new tensor [b, c, h, t, s], each head multiplied by its group's similarity."""
        return (tensor_bchts.unflatten(2, (self.groups, -1)) * self.similarity_bcgts.unsqueeze(3)).flatten(2, 3)

    def scores_bchts(self) -> Tensor:
        """The weight of x_s in y_t within a chunk, a D per head included."""
        scores = self.times_similarity(self.decay_bchts).mul_(self.dt_bchs.unsqueeze(3)).tril_()
        if self.skip_h is not None:
            scores.diagonal(dim1=3, dim2=4).add_(self.skip_h.unsqueeze(1))
        return scores

    @cached_property
    def decayed_x_bcgqw(self) -> Tensor:
        """dt x decayed to the end of the chunk."""
        return grouped(self.x_bcqhp * (self.dt_bcqh * self.to_state_bcqh).unsqueeze(4), self.groups)

    def pass_states(self, state_bgnrp: Tensor) -> tuple[Tensor, Tensor]:
        """The states before each chunk [b, c, g, n, r, p], and the one after the block."""
        added = (self.b_bcgqn.transpose(3, 4) @ self.decayed_x_bcgqw).unflatten(4, state_bgnrp.shape[3:])
        return _pass(added, state_bgnrp, self.across_bch.unflatten(2, (self.groups, -1)), range(self.span.chunks))

    def pass_state_gradients(self, grad_bcqhp: Tensor, grad_state_bgnrp: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the states after each chunk [b, c, g, n, r, p], and of the one before the block."""
        decayed_bcgqw = grouped(grad_bcqhp, self.groups)
        added = (self.c_bcgqn.transpose(3, 4) @ decayed_bcgqw).unflatten(4, grad_state_bgnrp.shape[3:])
        across = self.across_bch.unflatten(2, (self.groups, -1))
        return _pass(added, grad_state_bgnrp, across, range(self.span.chunks - 1, -1, -1))

    def from_states(self, before_bcgnrp: Tensor) -> Tensor:
        """The part of y that comes from the states [b, c, q, h, p]."""
        read_bcqhp = ungrouped(self.c_bcgqn @ before_bcgnrp.flatten(4), self.heads)
        return read_bcqhp.mul_(self.from_state_bcqh.unsqueeze(4))

    def within_chunks(self) -> Tensor:
        """The part of y that comes from x in the same chunk, with D x where D is one number per head."""
        return (self.scores_bchts() @ self.x_bchqp).transpose(2, 3)


def _pass(added: Tensor, state: Tensor, across_bcgr: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Walk the chunks in `order`: state <- across * state + added. Returns the states met [b, c, ...] and the last."""
    met = torch.empty_like(added)
    for place, chunk in enumerate(order):
        if place == 0:
            met[:, chunk] = state
        following = met[:, order[place + 1]] if place + 1 < len(order) else torch.empty_like(state)
        across = across_bcgr[:, chunk, :, None, :, None]
        state = torch.addcmul(added[:, chunk], met[:, chunk], across, out=following)
    return met, state


@dataclass(frozen=True)
class ScanInputs:
    """The tensors of one call, as they were given."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    seq_idx: Tensor | None
    chunk_size: int

    @property
    def wide(self) -> torch.dtype:
        """The accumulation dtype."""
        return accumulation_dtype(self.x.dtype)

    def spans(self) -> list[Span]:
        """The blocks of this call."""
        batch, length, heads, _ = self.x.shape
        at_once = chunks_at_once(batch, heads, self.chunk_size, self.x.device.type)
        return list(_spans(length, self.chunk_size, at_once))

    def skip_per_head(self) -> Tensor | None:
        """D [h], where it is one number per head."""
        return self.d.to(self.wide) if self.d is not None and self.d.dim() == 1 else None

    def skip_per_feature(self) -> Tensor | None:
        """D [h, p], where it has one number per feature."""
        return self.d.to(self.wide) if self.d is not None and self.d.dim() == 2 else None

    def state_shape(self) -> tuple[int, int, int, int, int]:
        """[b, g, n, r, p]."""
        batch, _, heads, head_dim = self.x.shape
        groups, state = self.b.shape[2:]
        return batch, groups, state, heads // groups, head_dim
