"""mamba-ssm's two combined operators of Mamba-2 in PyTorch, with its signatures.

    y = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_softplus=True)
    y = mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, headdim=64)

The second splits the input projection, runs the short convolution, the scan and the gate, and where weights are given
also the gated norm and the output projection. The mathematics is in torch_chunk_scan and torch_causal_conv1d.

What always holds: an argument that is not supported is a NotImplementedError that names it. `chunk_size` changes no
result beyond rounding: the chunk that is computed with is the one that is fast here. States are kept in fp32 (fp64 for
fp64 inputs) whatever `state_dtype` says: it is accepted because MambaMixer passes the parameters' dtype.

Tensor names: b batch, l length, h heads, p head dimension, g groups, n state dimension, d convolved channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.ssm.torch_accumulation import accumulation_dtype
from megatron.core.ssm.torch_causal_conv1d import causal_conv1d
from megatron.core.ssm.torch_chunk_block import chunks_at_once
from megatron.core.ssm.torch_chunk_scan import chunk_scan
from megatron.core.ssm.torch_gated_norm import gated_rms_norm

# The scores inside a chunk grow with its size, the states between chunks with its inverse: measured best on the CPU
# with tools/benchmark_mamba.py.
COMPUTED_CHUNK_SIZE = 64
_NO_LIMIT = (0.0, math.inf)


def tokens_per_kept_state(batch: int, heads: int, device_type: str) -> int:
    """Tokens of a sequence for which the backward of a scan keeps one state: a length grown by so many keeps one more.

    So what a scan keeps is linear in the length only in steps of so many tokens.
    """
    return COMPUTED_CHUNK_SIZE * chunks_at_once(batch, heads, COMPUTED_CHUNK_SIZE, device_type)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan of x [b, l, h, p] with step sizes dt [b, l, h]; returns y [b, l, h, p] in the dtype of x.

    A is [h] and negative, B and C are [b, l, g, n], D is [h] or [h, p], z the shape of x, dt_bias [h], initial_states
    [b, h, p, n], seq_idx [b, l]. The step size is dt + dt_bias, through softplus where asked, clamped to dt_limit.
    With return_final_states also the states after the last token, [b, h, p, n] in fp32 (fp64 for fp64 inputs).
    Raises NotImplementedError for cu_seqlens and return_varlen_states, ValueError for shapes that do not fit.
    """
    if cu_seqlens is not None or return_varlen_states:
        argument = "cu_seqlens" if cu_seqlens is not None else "return_varlen_states"
        raise NotImplementedError(
            f"{argument} is not supported by the PyTorch scan: use seq_idx, or install mamba-ssm."
        )
    _check_shapes(x, dt, A, B, C, chunk_size)
    y, final_states = chunk_scan(
        x,
        step_size(dt, dt_bias, dt_softplus, dt_limit),
        A,
        B,
        C,
        chunk_size=COMPUTED_CHUNK_SIZE,
        d=D,
        z_blhp=z,
        initial_states_bhpn=initial_states,
        seq_idx_bl=seq_idx,
    )
    return (y, final_states) if return_final_states else y


def step_size(dt_blh: Tensor, dt_bias_h: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """dt + dt_bias, through softplus where asked, clamped to the limit; in the accumulation dtype."""
    dt_blh = dt_blh.to(accumulation_dtype(dt_blh.dtype))
    if dt_bias_h is not None:
        dt_blh = dt_blh + dt_bias_h.to(dt_blh.dtype)
    if softplus:
        dt_blh = torch.nn.functional.softplus(dt_blh)
    if softplus and tuple(limit) == _NO_LIMIT:
        return dt_blh
    return dt_blh.clamp(*limit)


def _check_shapes(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int) -> None:
    """Raise ValueError unless the shapes are those of one scan."""
    if x.dim() != 4 or dt.shape != x.shape[:3] or a.shape != x.shape[2:3]:
        raise ValueError(
            f"x [b, l, h, p], dt [b, l, h] and A [h] are wanted, got x {tuple(x.shape)}, dt {tuple(dt.shape)}, "
            f"A {tuple(a.shape)}."
        )
    if b.dim() != 4 or b.shape != c.shape or b.shape[:2] != x.shape[:2] or x.shape[2] % b.shape[2]:
        raise ValueError(
            f"B and C [b, l, g, n] with g dividing the heads are wanted, got B {tuple(b.shape)}, C {tuple(c.shape)} "
            f"for x {tuple(x.shape)}."
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor | None,  # noqa: N803
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolution, scan and gate of the projection zxbcdt [b, l, 2 h p + 2 g n + h]; returns [b, l, h p].

    conv1d_weight is [h p + 2 g n, w], D is [h] with `headdim`, or [h, p] without. The gate multiplies the scan's output
    by silu(z); with rmsnorm_weight [h p] it is the gated norm instead, over groups of h p / g features. outproj_weight
    [width, h p] then projects. With return_final_states also the states, [b, h, p, n].
    """
    if headdim is None:
        if D is None or D.dim() != 2:
            raise ValueError("headdim is wanted unless D is [h, p].")
        headdim = D.shape[1]
    heads = A.shape[0]
    inner = heads * headdim
    bc = (zxbcdt.shape[2] - 2 * inner - heads) // 2
    if bc <= 0 or bc % ngroups or conv1d_weight.shape[0] != inner + 2 * bc:
        raise ValueError(
            f"zxbcdt {tuple(zxbcdt.shape)} and conv1d_weight {tuple(conv1d_weight.shape)} do not fit {heads} heads of "
            f"{headdim} in {ngroups} groups: 2 h p + 2 g n + h columns and h p + 2 g n channels are wanted."
        )
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * bc, heads], dim=2)
    xbc = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation=activation, seq_idx_bl=seq_idx)
    x, b, c = xbc.split([inner, bc, bc], dim=2)
    y, final_states = chunk_scan(
        x.unflatten(2, (heads, headdim)),
        step_size(dt, dt_bias, True, dt_limit),
        A,
        b.unflatten(2, (ngroups, -1)),
        c.unflatten(2, (ngroups, -1)),
        chunk_size=COMPUTED_CHUNK_SIZE,
        d=D,
        z_blhp=None if rmsnorm_weight is not None else z.unflatten(2, (heads, headdim)),
        initial_states_bhpn=initial_states,
        seq_idx_bl=seq_idx,
    )
    out = y.flatten(2)
    if rmsnorm_weight is not None:
        out = gated_rms_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if outproj_weight is not None:
        out = torch.nn.functional.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out
