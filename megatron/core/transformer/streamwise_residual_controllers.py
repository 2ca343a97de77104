"""A controller of the streamwise operators: the vector that holds one number per stream, and how it becomes factors.

    read = Controller(read_logits_p, num_streams=4, kind="read", sum_dtype=torch.float32)
    factor_k = read.factors()                      # sigmoid(r_k)
    grad_p = read.gradient(grad_factor_k)          # d/dr: sigmoid'(r_k) grad_k, exact zeros behind the streams

Made by streamwise_residual_autograd, used by the backends (streamwise_residual_backends). What always holds: factors
are computed in fp64 and rounded once, at most one time per controller object; only the first K elements of a padded
vector have influence, and the gradient of the others is exactly zero. No value is brought to the host.

Tensor names: k streams, p length of a padded controller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

ControllerKind = Literal["factor", "read", "write", "retention"]


@dataclass(frozen=True)
class Controller:
    """One controller of one call.

    Args:
        values_p: [p] with p >= K, fp32 or fp64: logits, or the factors themselves for kind "factor".
        num_streams: K.
        kind: "factor": f = values; "read": f = sigmoid(r); "write": f = 2 sigmoid(s); "retention": f = 1 - F
            sigmoid(-q).
        sum_dtype: fp32 or fp64, in which the call accumulates.
        max_forget: F, for kind "retention".
    """

    values_p: Tensor
    num_streams: int
    kind: ControllerKind
    sum_dtype: torch.dtype
    max_forget: float = 0.0
    _made: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def factors(self) -> Tensor:
        """[K] factors in `sum_dtype`, contiguous."""
        if not self._made:
            self._made.append(self._make_factors().to(self.sum_dtype).contiguous())
        return self._made[0]

    def _make_factors(self) -> Tensor:
        if self.kind == "read":
            return sigmoid_read_factors(self.values_p, self.num_streams)
        if self.kind == "write":
            return sigmoid_write_factors(self.values_p, self.num_streams)
        if self.kind == "retention":
            return sigmoid_retention_factors(self.values_p, self.num_streams, self.max_forget)
        return self.values_p

    @property
    def slope_scale(self) -> float:
        """c in df/dvalue = c sigmoid'(value); sigmoid' is even, so one formula serves the three maps."""
        return {"read": 1.0, "write": 2.0, "retention": self.max_forget}[self.kind]

    def gradient(self, grad_factor_k: Tensor) -> Tensor:
        """[p] gradient of values_p, in its dtype, from the [K] gradient of the factors; zeros behind the streams."""
        grad_k = grad_factor_k
        if self.kind != "factor":
            sigmoid_k = self.values_p[: self.num_streams].double().sigmoid()
            grad_k = grad_k * (self.slope_scale * (sigmoid_k * (1 - sigmoid_k)))
        if self.values_p.shape == grad_k.shape:
            return grad_k.to(self.values_p.dtype)
        grad_p = torch.zeros_like(self.values_p)
        grad_p[: self.num_streams].copy_(grad_k)
        return grad_p


def sigmoid_read_factors(read_logits: Tensor, num_streams: int) -> Tensor:
    """[K] read factors sigmoid(r_k) of [p] logits, in the dtype of the logits; differentiable.

    Computed in fp64 and rounded once: an fp32 sigmoid is off by up to 2 ulp, which the sum over the streams keeps.
    """
    return read_logits[:num_streams].double().sigmoid().to(read_logits.dtype)


def sigmoid_write_factors(write_logits: Tensor, num_streams: int) -> Tensor:
    """[K] write factors 2 sigmoid(s_k) of [p] logits, in the dtype of the logits, rounded once; differentiable."""
    return (2 * write_logits[:num_streams].double().sigmoid()).to(write_logits.dtype)


def sigmoid_retention_factors(retention_logits: Tensor, num_streams: int, max_forget: float) -> Tensor:
    """[K] retention factors 1 - F sigmoid(-q_k) of [p] logits, in their dtype, rounded once; differentiable."""
    forget_k = torch.sigmoid(-retention_logits[:num_streams].double())
    return (1 - max_forget * forget_k).to(retention_logits.dtype)
