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

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from megatron.core.ssm.torch_chunk_block import ScanBlock, ScanInputs, Span, grouped, head_major, ungrouped


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
        inputs = ScanInputs(x, dt, a, b, c, d, z, seq_idx, chunk_size)
        if initial_states is None:
            state = x.new_zeros(inputs.state_shape(), dtype=inputs.wide)
        else:
            state = _from_public_state(initial_states, b.shape[2], inputs.wide)
        skip = inputs.skip_per_feature()
        y = x.new_empty(x.shape)
        block_states = []
        for span in inputs.spans():
            block = ScanBlock(span, inputs)
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
        inputs = ScanInputs(x, dt, a, b, c, d, z, seq_idx, ctx.chunk_size)
        backward = _Backward(inputs, _from_public_state(grad_final, b.shape[2], inputs.wide))
        for span, state in zip(reversed(inputs.spans()), reversed(block_states), strict=True):
            backward.block(span, state, span.cut(grad_y).to(inputs.wide))
        return *backward.gradients(ctx.initial_dtype), None, None


class _Backward:
    """Gradients of one call, gathered block by block from the last to the first."""

    def __init__(self, inputs: ScanInputs, grad_state_bgnrp: Tensor) -> None:
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

    def block(self, span: Span, state_bgnrp: Tensor, grad_bcqhp: Tensor) -> None:
        """Add one block, given the state before it and the gradient of its (gated) output."""
        block = ScanBlock(span, self._inputs)
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
        into_bcqhp = ungrouped(block.b_bcgqn @ after_bcgnrp.flatten(4), block.heads)
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
        grad_c = grouped(read_bcqhp, block.groups) @ before_bcgnw.transpose(3, 4)
        grad_b = block.decayed_x_bcgqw @ after_bcgnw.transpose(3, 4)
        span.cut(self._c).copy_((grad_c + grad_similarity_bcgts @ block.b_bcgqn).transpose(2, 3))
        span.cut(self._b).copy_((grad_b + grad_similarity_bcgts.transpose(3, 4) @ block.c_bcgqn).transpose(2, 3))

    def _gate(self, block: ScanBlock, z_blhp: Tensor, from_states_bcqhp: Tensor, grad_bcqhp: Tensor) -> Tensor:
        """The gradient of z; returns the gradient of y before the gate."""
        z = block.span.cut(z_blhp).to(self._inputs.wide)
        y = from_states_bcqhp + block.within_chunks()
        if self._skip_hp is not None:
            y.addcmul_(block.x_bcqhp, self._skip_hp)
        assert self._z is not None
        block.span.cut(self._z).copy_(torch.ops.aten.silu_backward(y.mul_(grad_bcqhp), z))
        return grad_bcqhp * silu(z)

    def _scores(self, block: ScanBlock, grad_bcqhp: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x [b, c, h, q, p], of dt and of dt A [b, c, q, h], of C B^T [b, c, g, t, s]."""
        grad_bchqp = head_major(grad_bcqhp)
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
