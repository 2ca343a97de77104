"""One step of Mamba-2's recurrence in PyTorch, for decoding.

    y = selective_state_update(state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)

The signature is that of megatron.core.ssm.ops.mamba_ssm.selective_state_update, whose Triton kernel needs a GPU. Per
head: S <- exp(dt A) S + dt x B^T, y = S C + D x, gated: y silu(z) (Dao & Gu 2024, arXiv 2405.21060, equation 2).

What always holds: the state is updated in place, computed in fp32 (fp64 for fp64 states) over all tokens of the call
and rounded once at the end. Nothing here is meant for training.

Tensor names: b batch, s tokens of the call, h heads, p head dimension, g groups, n state dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ssm.torch_accumulation import accumulation_dtype
from megatron.core.ssm.torch_causal_conv1d import state_slots


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    intermediate_ssm_states: Tensor | None = None,
) -> Tensor:
    """Advance `state` [slots, h, p, n] by the tokens of x [b, h, p] or [b, s, h, p]; returns y in shape and dtype of x.

    dt and z have the shape of x, A is [h, p, n], B and C are [b, g, n] or [b, s, g, n], D and dt_bias [h, p]. Without
    the head dimension (state [slots, p, n]) every one of them lacks it. `state_batch_indices` [b] says which slot a
    sequence has; a negative one yields zeros and touches nothing. The state after each token is written to
    `intermediate_ssm_states` [slots, s, h, p, n] where given.
    """
    if state.dim() == 3:
        return _without_heads(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, intermediate_ssm_states
        )
    shape = x.shape
    if x.dim() == 3:
        x, dt, b, c = (tensor.unsqueeze(1) for tensor in (x, dt, B, C))
        z = None if z is None else z.unsqueeze(1)
    else:
        b, c = B, C
    wide = accumulation_dtype(state.dtype if state.dtype == torch.float64 else x.dtype)
    slots, active = state_slots(state_batch_indices, x, state)
    x_ashp, dt_ashp, b_asgn, c_asgn = (tensor[active].to(wide) for tensor in (x, dt, b, c))
    if dt_bias is not None:
        dt_ashp = dt_ashp + dt_bias.to(wide)
    if dt_softplus:
        dt_ashp = torch.nn.functional.softplus(dt_ashp)
    per_group = x.shape[2] // b.shape[2]
    state_ahpn, rate_hpn, y_steps = state[slots].to(wide), A.to(wide), []
    for s in range(x.shape[1]):
        decay_ahpn = (dt_ashp[:, s, :, :, None] * rate_hpn).exp_()
        b_ahn, c_ahn = (t[:, s].repeat_interleave(per_group, dim=1) for t in (b_asgn, c_asgn))
        added_ahpn = (dt_ashp[:, s] * x_ashp[:, s]).unsqueeze(3) * b_ahn.unsqueeze(2)
        state_ahpn = torch.addcmul(added_ahpn, state_ahpn, decay_ahpn)
        if intermediate_ssm_states is not None:
            intermediate_ssm_states[slots, s] = state_ahpn.to(intermediate_ssm_states.dtype)
        y_steps.append((state_ahpn @ c_ahn.unsqueeze(3)).squeeze(3))
    y_ashp = torch.stack(y_steps, dim=1)
    if D is not None:
        y_ashp = y_ashp + x_ashp * D.to(wide)
    if z is not None:
        y_ashp = y_ashp * torch.nn.functional.silu(z[active].to(wide))
    state[slots] = state_ahpn.to(state.dtype)
    y = torch.zeros_like(x)
    y[active] = y_ashp.to(x.dtype)
    return y.view(shape)


def _without_heads(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    intermediate_ssm_states: Tensor | None,
) -> Tensor:
    """The same for one head that has no dimension of its own: [b, p] or [b, s, p]."""
    x, dt, b, c = (tensor.unsqueeze(-2) for tensor in (x, dt, b, c))
    y = selective_state_update(
        state.unsqueeze(1),
        x,
        dt,
        rate.unsqueeze(0),
        b,
        c,
        None if d is None else d.unsqueeze(0),
        None if z is None else z.unsqueeze(-2),
        None if dt_bias is None else dt_bias.unsqueeze(0),
        dt_softplus,
        state_batch_indices,
        None if intermediate_ssm_states is None else intermediate_ssm_states.unsqueeze(2),
    )
    return y.squeeze(-2)
