"""Gated RMS normalisation in PyTorch, with the constructor and parameters of mamba-ssm's layernorm_gated.RMSNorm.

    norm = RMSNorm(2048, eps=1e-5, group_size=1024, norm_before_gate=False)
    y = norm(x, z)       # or norm(x), without a gate

With u = x silu(z): y = w u / rms(u), or with norm_before_gate y = w x / rms(x) silu(z); rms over groups of `group_size`
neighbouring features (Dao & Gu 2024, arXiv 2405.21060, section 7.2).

What always holds: computed in fp32 (fp64 for fp64 inputs) and rounded once, to the dtype of x. The backward keeps x, z
and one number per group, and computes the rest again.

Tensor names: n tokens (any leading shape), g groups, f features of a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ssm.torch_accumulation import accumulation_dtype


class RMSNorm(torch.nn.Module):
    """RMS normalisation over groups of features with an optional gate; `weight` [hidden_size] starts at one."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if group_size is not None and hidden_size % group_size:
            raise ValueError(f"hidden_size {hidden_size} is no multiple of group_size {group_size}.")
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise x [..., hidden_size], gated by z of the same shape where given."""
        groups = 1 if self.group_size is None else x.shape[-1] // self.group_size
        return gated_rms_norm(x, z, self.weight, self.eps, groups, self.norm_before_gate)


def gated_rms_norm(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, groups: int, norm_before_gate: bool
) -> Tensor:
    """The module's function: normalise x [..., groups * f] over f features at a time. Differentiable once."""
    return _GatedNorm.apply(x, z, weight, eps, groups, norm_before_gate)


class _GatedNorm(torch.autograd.Function):
    """w rms-normalised x, gated before or after."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, groups: int, norm_before_gate: bool
    ) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        x_ngf = x.to(wide).unflatten(-1, (groups, -1))
        silu_ngf = None if z is None else torch.nn.functional.silu(z.to(wide)).unflatten(-1, (groups, -1))
        u_ngf = x_ngf if silu_ngf is None or norm_before_gate else x_ngf * silu_ngf
        scale_ng1 = u_ngf.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y_ngf = (u_ngf * scale_ng1).mul_(weight.to(wide).unflatten(0, (groups, -1)))
        if silu_ngf is not None and norm_before_gate:
            y_ngf.mul_(silu_ngf)
        ctx.save_for_backward(x, z, weight, scale_ng1)
        ctx.groups, ctx.norm_before_gate = groups, norm_before_gate
        return y_ngf.flatten(-2).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        x, z, weight, scale_ng1 = ctx.saved_tensors
        wide, split = scale_ng1.dtype, (ctx.groups, -1)
        grad_ngf = grad_y.to(wide).unflatten(-1, split)
        x_ngf, weight_gf = x.to(wide).unflatten(-1, split), weight.to(wide).unflatten(0, split)
        silu_ngf = slope_ngf = grad_z = None
        u_ngf = x_ngf
        if z is not None:
            z_ngf = z.to(wide).unflatten(-1, split)
            sigmoid_ngf = z_ngf.sigmoid()
            silu_ngf = z_ngf * sigmoid_ngf
            slope_ngf = torch.addcmul(sigmoid_ngf, silu_ngf, 1 - sigmoid_ngf)
            if not ctx.norm_before_gate:
                u_ngf = x_ngf * silu_ngf
        normed_ngf = u_ngf * scale_ng1
        if silu_ngf is not None and slope_ngf is not None and ctx.norm_before_gate:
            grad_z = slope_ngf.mul_(grad_ngf).mul_(normed_ngf).mul_(weight_gf)
            grad_ngf = grad_ngf * silu_ngf
        grad_weight = (grad_ngf * normed_ngf).flatten(0, -3).sum(0).flatten().to(weight.dtype)
        grad_ngf = grad_ngf * weight_gf
        grad_u_ngf = (grad_ngf - normed_ngf * (grad_ngf * normed_ngf).mean(-1, keepdim=True)).mul_(scale_ng1)
        if silu_ngf is not None and slope_ngf is not None and not ctx.norm_before_gate:
            grad_z = slope_ngf.mul_(grad_u_ngf).mul_(x_ngf)
            grad_u_ngf = grad_u_ngf.mul_(silu_ngf)
        if grad_z is not None:
            grad_z = grad_z.flatten(-2).to(z.dtype)
        return grad_u_ngf.flatten(-2).to(x.dtype), grad_z, grad_weight, None, None, None
