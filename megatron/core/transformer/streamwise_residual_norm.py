"""The RMSNorm or LayerNorm behind a streamwise read, as the operators take it.

    norm = stream_norm_of(layer.input_layernorm)           # None where it must run as the module that it is
    n = streamwise_sigmoid_read(x, read_logits, 4, norm=norm)                  # norm(z), z never in memory

A backend that fuses norms reads, rounds z to its dtype and norms it in one pass over the stream; its backward computes
z again from the stream, which the read's backward goes over anyway. So z is neither written nor kept: what is kept
beside the stream is one number per token, two with a LayerNorm. Elsewhere read and norm run one after the other.

What always holds: the parameters are those of the module, with every mark that they carry; whether a norm is fused
depends on the kind of module, the hooks on it, dtypes and the width, never on tokens, grad mode or requires_grad.

Tensor names: n tokens, d branch width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

NormKind = Literal["RMSNorm", "LayerNorm"]

_KINDS: dict[type[torch.nn.Module], NormKind] = {torch.nn.RMSNorm: "RMSNorm", torch.nn.LayerNorm: "LayerNorm"}
_PARAMETER_GATHER = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"
"""Upstream's hook, on every module under --overlap-param-gather, that waits for the module's parameters."""


class StreamNorm(NamedTuple):
    """A norm over the last dimension of a branch input. (A tuple, which torch.compile can follow being made.)

    Args:
        kind: "RMSNorm": w z / sqrt(mean(z^2) + eps); "LayerNorm": w (z - mean) / sqrt(var + eps) + b.
        width: D.
        eps: added below the root.
        weight_d, bias_d: [D]; None for 1 and 0. An RMSNorm has no bias.
    """

    kind: NormKind
    width: int
    eps: float
    weight_d: Tensor | None = None
    bias_d: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Norm z [..., D] by PyTorch's function, as the module does."""
        if self.kind == "RMSNorm":
            return torch.nn.functional.rms_norm(z, (self.width,), self.weight_d, self.eps)
        return torch.nn.functional.layer_norm(z, (self.width,), self.weight_d, self.bias_d, self.eps)

    def takes(self, branch_dtype: torch.dtype) -> bool:
        """Whether a fused norm serves this dtype of z: that of the parameters, or half precision beside fp32 ones."""
        is_half = branch_dtype in (torch.bfloat16, torch.float16)
        for parameter in (self.weight_d, self.bias_d):
            if parameter is None or parameter.dtype is branch_dtype:
                continue
            if not (is_half and parameter.dtype is torch.float32):
                return False
        return True


@dataclass
class NormCall:
    """One norm in one call of an operator, with what the forward keeps and what the backward finds.

    Args:
        norm: the norm.
        sum_dtype: fp32 or fp64, in which statistics and sums are held.
        mean_n, scale_n: [n], set by the forward: the mean (of a LayerNorm alone) and 1 / sqrt(... + eps).
        grad_weight_d, grad_bias_d: [D], set by the backward; the bias's of a LayerNorm alone.
    """

    norm: StreamNorm
    sum_dtype: torch.dtype
    mean_n: Tensor | None = None
    scale_n: Tensor | None = None
    grad_weight_d: Tensor | None = None
    grad_bias_d: Tensor | None = None

    @property
    def is_layer_norm(self) -> bool:
        """Whether it is a LayerNorm, else an RMSNorm."""
        return self.norm.kind == "LayerNorm"

    def weight(self, device: torch.device) -> Tensor:
        """[D] weights in `sum_dtype`, contiguous; ones where the norm has none."""
        if self.norm.weight_d is None:
            return torch.ones(self.norm.width, dtype=self.sum_dtype, device=device)
        return self._as_sums(self.norm.weight_d)

    def bias(self, device: torch.device) -> Tensor | None:
        """[D] biases of a LayerNorm like `weight`, zeros where it has none; None for an RMSNorm."""
        if not self.is_layer_norm:
            return None
        if self.norm.bias_d is None:
            return torch.zeros(self.norm.width, dtype=self.sum_dtype, device=device)
        return self._as_sums(self.norm.bias_d)

    def _as_sums(self, parameter_d: Tensor) -> Tensor:
        """A parameter's values in `sum_dtype`, contiguous; itself where it is."""
        if parameter_d.dtype is self.sum_dtype and parameter_d.is_contiguous():
            return parameter_d
        return parameter_d.detach().to(self.sum_dtype).contiguous()

    def allocate_statistics(self, n: int, device: torch.device) -> None:
        """Make room for what the forward keeps of n tokens."""
        self.scale_n = torch.empty(n, dtype=self.sum_dtype, device=device)
        self.mean_n = torch.empty(n, dtype=self.sum_dtype, device=device) if self.is_layer_norm else None

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias in their dtypes; None for a parameter that the norm does not have."""
        norm = self.norm
        return _gradient_of(norm.weight_d, self.grad_weight_d), _gradient_of(norm.bias_d, self.grad_bias_d)


def _gradient_of(parameter_d: Tensor | None, gradient_d: Tensor | None) -> Tensor | None:
    """The gradient in the dtype of its parameter; None where there is no parameter."""
    if parameter_d is None:
        return None
    assert gradient_d is not None
    return gradient_d if gradient_d.dtype is parameter_d.dtype else gradient_d.to(parameter_d.dtype)


def is_stream_norm(module: torch.nn.Module) -> bool:
    """Whether a module is of a class of which stream_norm_of knows what it computes."""
    return type(module) in _KINDS


def is_watched(module: torch.nn.Module) -> bool:
    """Whether hooks look at what the module returns or at its gradients."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or _has_global_hooks()


def is_prepared(module: torch.nn.Module) -> bool:
    """Whether hooks do something before the module's forward, other than to wait for its parameters."""
    hooks = module._forward_pre_hooks.values()
    return any(getattr(hook, "__qualname__", "") != _PARAMETER_GATHER for hook in hooks)


def stream_norm_of(module: torch.nn.Module) -> StreamNorm | None:
    """The norm that a module of PyTorch computes, or None where it has to be called to do what it does.

    That is: another class (also a subclass, or a norm with zero-centred weights), no eps of its own, parameters of
    another kind, or hooks. Upstream's hook that waits for parameters is run here, since the module is not called.
    """
    kind = _KINDS.get(type(module))
    if kind is None or is_watched(module):
        return None
    found: Any = module
    weight_d, bias_d = found.weight, getattr(found, "bias", None)
    if len(found.normalized_shape) != 1 or found.eps is None:
        return None
    for parameter in (weight_d, bias_d):
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            return None
    if is_prepared(module):
        return None
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return StreamNorm(kind, found.normalized_shape[0], found.eps, weight_d, bias_d)


def _has_global_hooks() -> bool:
    """Whether hooks on all modules are registered, as profilers and counters do."""
    return bool(torch.nn.modules.module._has_any_global_hook())
