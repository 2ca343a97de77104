"""The selective scan of Mamba-2 in chunks: matrix products in PyTorch, forward and hand-written backward.

    y_blhp, final_bhpn = chunk_scan(x_blhp, dt_blh, a_h, b_blgn, c_blgn, chunk_size=64)

The recurrence per head, with decay exp(dt_t A):

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,    y_t = C_t S_t + D x_t,    gated: y_t silu(z_t)

is computed as structured state-space duality says (Dao & Gu 2024, arXiv 2405.21060, section 6): inside a chunk as a
masked product of C and B, between chunks through one state per chunk. No token is visited by Python; a few chunks at a
time are, so that their scores stay in cache (CPU) or within a bound (GPU).

What always holds: sums are accumulated in fp32, in fp64 for fp64 inputs; a decay below e^-60 (e^-600 in fp64) is zero.
Memory is linear in the length: the backward keeps the inputs and one state per block of chunks, and computes everything
else again. A length that is no multiple of the chunk ends in a shorter chunk; nothing is padded. Heads that share a
group share its B and C without a copy.

Tensor names: b batch, l length, h heads, p head dimension, g groups, r heads per group, n state dimension, c chunks of
a block, q positions of a chunk (t the later, s the earlier one of a pair), a a_h the decay rates A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

# Elements of one block's scores [b, c, h, q, q]: what fits in a CPU's second-level cache, and what a GPU may hold.
_SCORES_PER_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tensors of `dtype` are made: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _decay(log_decay: Tensor) -> Tensor:
    """exp, in place, with zero for what is negligible: numbers near the smallest would slow products down tenfold."""
    negligible = -600.0 if log_decay.dtype == torch.float64 else -60.0
    return torch.threshold_(log_decay, negligible, -torch.inf).exp_()


def chunk_scan(
    x_blhp: Tensor,
    dt_blh: Tensor,
    a_h: Tensor,
    b_blgn: Tensor,
    c_blgn: Tensor,
    *,
    chunk_size: int,
    d: Tensor | None = None,
    z_blhp: Tensor | None = None,
    initial_states_bhpn: Tensor | None = None,
    seq_idx_bl: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan the sequence; returns y [b, l, h, p] in the dtype of x, and the state after the last token [b, h, p, n].

    `dt_blh` is the finished step size. `d` is [h] or [h, p]. Tokens of different `seq_idx_bl` do not see each other;
    the initial states belong to the sequence of the first token. The final states have the accumulation dtype.
    Differentiable in every floating-point argument, once.
    """
    return _ChunkScan.apply(x_blhp, dt_blh, a_h, b_blgn, c_blgn, d, z_blhp, initial_states_bhpn, seq_idx_bl, chunk_size)


@dataclass(frozen=True)
class _Span:
    """A block of `chunks` chunks of `size` tokens that begins at token `start`."""

    start: int
    chunks: int
    size: int

    def cut(self, tensor_bl: Tensor) -> Tensor:
        """[b, l, ...] -> [b, c, q, ...], a view."""
        return tensor_bl.narrow(1, self.start, self.chunks * self.size).unflatten(1, (self.chunks, self.size))


def _spans(length: int, chunk_size: int, scores_per_chunk: int, device_type: str) -> Iterator[_Span]:
    """Whole chunks in blocks of bounded scores, then the rest as one shorter chunk."""
    at_once = max(1, _SCORES_PER_BLOCK.get(device_type, 1 << 26) // scores_per_chunk)
    whole, rest = divmod(length, chunk_size)
    for first in range(0, whole, at_once):
        yield _Span(first * chunk_size, min(at_once, whole - first), chunk_size)
    if rest:
        yield _Span(whole * chunk_size, 1, rest)


def _grouped(tensor_bcqhp: Tensor, groups: int) -> Tensor:
    """[b, c, q, h, p] -> [b, c, g, q, r*p], a view."""
    return tensor_bcqhp.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)


def _ungrouped(tensor_bcgqw: Tensor, heads: int) -> Tensor:
    """[b, c, g, q, r*p] -> [b, c, q, h, p], a view."""
    tensor_bcqgw = tensor_bcgqw.transpose(2, 3)
    return tensor_bcqgw.unflatten(4, (heads // tensor_bcqgw.shape[3], -1)).flatten(3, 4)


def _head_major(tensor_bcqhp: Tensor) -> Tensor:
    """[b, c, q, h, p] -> contiguous [b, c, h, q, p]."""
    return tensor_bcqhp.transpose(2, 3).contiguous()


class _Block:
    """One block's inputs in the accumulation dtype, and what forward and backward both derive from them."""

    def __init__(self, span: _Span, inputs: _Inputs) -> None:
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
        return _head_major(self.x_bcqhp)

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
        return _grouped(self.x_bcqhp * (self.dt_bcqh * self.to_state_bcqh).unsqueeze(4), self.groups)

    def pass_states(self, state_bgnrp: Tensor) -> tuple[Tensor, Tensor]:
        """The states before each chunk [b, c, g, n, r, p], and the one after the block."""
        added = (self.b_bcgqn.transpose(3, 4) @ self.decayed_x_bcgqw).unflatten(4, state_bgnrp.shape[3:])
        return _pass(added, state_bgnrp, self.across_bch.unflatten(2, (self.groups, -1)), range(self.span.chunks))

    def pass_state_gradients(self, grad_bcqhp: Tensor, grad_state_bgnrp: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the states after each chunk [b, c, g, n, r, p], and of the one before the block."""
        decayed_bcgqw = _grouped(grad_bcqhp, self.groups)
        added = (self.c_bcgqn.transpose(3, 4) @ decayed_bcgqw).unflatten(4, grad_state_bgnrp.shape[3:])
        across = self.across_bch.unflatten(2, (self.groups, -1))
        return _pass(added, grad_state_bgnrp, across, range(self.span.chunks - 1, -1, -1))

    def from_states(self, before_bcgnrp: Tensor) -> Tensor:
        """The part of y that comes from the states [b, c, q, h, p]."""
        read_bcqhp = _ungrouped(self.c_bcgqn @ before_bcgnrp.flatten(4), self.heads)
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
class _Inputs:
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

    def spans(self) -> list[_Span]:
        """The blocks of this call."""
        batch, length, heads, _ = self.x.shape
        scores_per_chunk = batch * heads * self.chunk_size**2
        return list(_spans(length, self.chunk_size, max(1, scores_per_chunk), self.x.device.type))

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


def _from_public_state(state_bhpn: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[b, h, p, n] -> contiguous [b, g, n, r, p]."""
    return state_bhpn.to(dtype).unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).contiguous()


def _to_public_state(state_bgnrp: Tensor) -> Tensor:
    """[b, g, n, r, p] -> contiguous [b, h, p, n]."""
    return state_bgnrp.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()


class _ChunkScan(torch.autograd.Function):
    """chunk_scan with a backward that computes each block again from the state before it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        z: Tensor | None,
        initial_states: Tensor | None,
        seq_idx: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = _Inputs(x, dt, a, b, c, d, z, seq_idx, chunk_size)
        if initial_states is None:
            state = x.new_zeros(inputs.state_shape(), dtype=inputs.wide)
        else:
            state = _from_public_state(initial_states, b.shape[2], inputs.wide)
        skip = inputs.skip_per_feature()
        y = x.new_empty(x.shape)
        block_states = []
        for span in inputs.spans():
            block = _Block(span, inputs)
            block_states.append(state)
            before, state = block.pass_states(state)
            y_block = block.from_states(before).add_(block.within_chunks())
            if skip is not None:
                y_block.addcmul_(block.x_bcqhp, skip)
            if z is None:
                span.cut(y).copy_(y_block)
            else:
                torch.mul(y_block, silu(span.cut(z).to(inputs.wide)), out=span.cut(y))
        ctx.save_for_backward(x, dt, a, b, c, d, z, seq_idx, *block_states)
        ctx.chunk_size = chunk_size
        ctx.initial_dtype = None if initial_states is None else initial_states.dtype
        return y, _to_public_state(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_final: Tensor) -> tuple[Any, ...]:
        x, dt, a, b, c, d, z, seq_idx, *block_states = ctx.saved_tensors
        inputs = _Inputs(x, dt, a, b, c, d, z, seq_idx, ctx.chunk_size)
        backward = _Backward(inputs, _from_public_state(grad_final, b.shape[2], inputs.wide))
        for span, state in zip(reversed(inputs.spans()), reversed(block_states), strict=True):
            backward.block(span, state, span.cut(grad_y).to(inputs.wide))
        return *backward.gradients(ctx.initial_dtype), None, None


class _Backward:
    """Gradients of one call, gathered block by block from the last to the first."""

    def __init__(self, inputs: _Inputs, grad_state_bgnrp: Tensor) -> None:
        self._inputs = inputs
        self._grad_state = grad_state_bgnrp
        self._a_h = inputs.a.to(inputs.wide)
        self._skip_hp = inputs.skip_per_feature()
        self._x, self._dt, self._b, self._c = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (inputs.x, inputs.dt, inputs.b, inputs.c)
        )
        self._z = None if inputs.z is None else torch.empty_like(inputs.z, memory_format=torch.contiguous_format)
        self._a = torch.zeros_like(self._a_h)
        self._d = None if inputs.d is None else inputs.d.new_zeros(inputs.d.shape, dtype=inputs.wide)

    def gradients(self, initial_dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, dt, a, b, c, d, z and the initial states, in their dtypes and shapes."""
        inputs = self._inputs
        grad_d = None if self._d is None or inputs.d is None else self._d.to(inputs.d.dtype)
        initial = None if initial_dtype is None else _to_public_state(self._grad_state).to(initial_dtype)
        return self._x, self._dt, self._a.to(inputs.a.dtype), self._b, self._c, grad_d, self._z, initial

    def block(self, span: _Span, state_bgnrp: Tensor, grad_bcqhp: Tensor) -> None:
        """Add one block, given the state before it and the gradient of its (gated) output."""
        block = _Block(span, self._inputs)
        before_bcgnrp, _ = block.pass_states(state_bgnrp)
        from_states_bcqhp = block.from_states(before_bcgnrp)
        if self._inputs.z is not None:
            grad_bcqhp = self._gate(block, self._inputs.z, from_states_bcqhp, grad_bcqhp)
        read_bcqhp = grad_bcqhp * block.from_state_bcqh.unsqueeze(4)
        after_bcgnrp, self._grad_state = block.pass_state_gradients(read_bcqhp, self._grad_state)

        # The decay of a step multiplies all that passes it. Within a chunk, what earlier positions gave to it or later;
        # every pair is summed where it belongs, because sums over all pairs would cancel and lose a small gradient.
        grad_x_bchqp, grad_dt_bcqh, grad_rate_bcqh, grad_similarity_bcgts = self._scores(block, grad_bcqhp)
        # What the states gave to it or later positions,
        grad_rate_bcqh += (grad_bcqhp * from_states_bcqhp).sum(4).flip(2).cumsum(2).flip(2)
        # what earlier positions gave to the state after the chunk, and what the state before the chunk gave to that.
        into_bcqhp = _ungrouped(block.b_bcgqn @ after_bcgnrp.flatten(4), block.heads)
        into_bcqh = (into_bcqhp * block.x_bcqhp).sum(4).mul_(block.to_state_bcqh)
        grad_dt_bcqh = grad_dt_bcqh + into_bcqh
        grad_rate_bcqh[:, :, 1:] += into_bcqh.mul_(block.dt_bcqh)[:, :, :-1].cumsum(2)
        kept_bch = (after_bcgnrp * before_bcgnrp).sum((3, 5)).flatten(2).mul_(block.across_bch)
        grad_rate_bcqh += kept_bch.unsqueeze(2)

        self._a += (grad_rate_bcqh * block.dt_bcqh).sum((0, 1, 2))
        span.cut(self._dt).copy_(grad_dt_bcqh.addcmul_(grad_rate_bcqh, self._a_h))
        weight_bcqh1 = (block.dt_bcqh * block.to_state_bcqh).unsqueeze(4)
        grad_x_bcqhp = into_bcqhp.mul_(weight_bcqh1).add_(grad_x_bchqp.transpose(2, 3))
        if self._skip_hp is not None and self._d is not None:
            self._d += (grad_bcqhp * block.x_bcqhp).sum((0, 1, 2))
            grad_x_bcqhp.addcmul_(grad_bcqhp, self._skip_hp)
        span.cut(self._x).copy_(grad_x_bcqhp)

        before_bcgnw, after_bcgnw = before_bcgnrp.flatten(4), after_bcgnrp.flatten(4)
        grad_c = _grouped(read_bcqhp, block.groups) @ before_bcgnw.transpose(3, 4)
        grad_b = block.decayed_x_bcgqw @ after_bcgnw.transpose(3, 4)
        span.cut(self._c).copy_((grad_c + grad_similarity_bcgts @ block.b_bcgqn).transpose(2, 3))
        span.cut(self._b).copy_((grad_b + grad_similarity_bcgts.transpose(3, 4) @ block.c_bcgqn).transpose(2, 3))

    def _gate(self, block: _Block, z_blhp: Tensor, from_states_bcqhp: Tensor, grad_bcqhp: Tensor) -> Tensor:
        """The gradient of z; returns the gradient of y before the gate."""
        z = block.span.cut(z_blhp).to(self._inputs.wide)
        y = from_states_bcqhp + block.within_chunks()
        if self._skip_hp is not None:
            y.addcmul_(block.x_bcqhp, self._skip_hp)
        assert self._z is not None
        block.span.cut(self._z).copy_(torch.ops.aten.silu_backward(y.mul_(grad_bcqhp), z))
        return grad_bcqhp * silu(z)

    def _scores(self, block: _Block, grad_bcqhp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x [b, c, h, q, p], of dt and of dt A [b, c, q, h], of C B^T [b, c, g, t, s]."""
        grad_bchqp = _head_major(grad_bcqhp)
        grad_x_bchqp = block.scores_bchts().transpose(3, 4) @ grad_bchqp
        grad_scores = grad_bchqp @ block.x_bchqp.transpose(3, 4)
        if block.skip_h is not None and self._d is not None:
            self._d += grad_scores.diagonal(dim1=3, dim2=4).sum((0, 1, 3))
        # The decay above the diagonal may be infinite: cut what was multiplied by it.
        grad_scores.mul_(block.decay_bchts).tril_()
        pairs_bchts = block.times_similarity(grad_scores)
        grad_dt_bchs = pairs_bchts.sum(3)
        pairs_bchts.mul_(block.dt_bchs.unsqueeze(3))
        # Pair (t, s) passes the steps s+1 .. t: sum over s before j, then over t from j on.
        before_sj = torch.ones_like(pairs_bchts[0, 0, 0]).triu_(1)
        grad_rate_bchj = (pairs_bchts @ before_sj).tril_().sum(3)
        by_group = grad_scores.mul_(block.dt_bchs.unsqueeze(3)).unflatten(2, (block.groups, -1))
        grad_similarity_bcgts = by_group.sum(3)
        if block.same_sequence_bcts is not None:
            grad_similarity_bcgts.mul_(block.same_sequence_bcts.unsqueeze(2))
        return grad_x_bchqp, grad_dt_bchs.transpose(2, 3), grad_rate_bchj.transpose(2, 3), grad_similarity_bcgts
