"""What a backend of the streamwise operators implements, at one of two levels.

- StreamwiseKernels: functions of contiguous tensors and factors (eager). FactorOperators
  (streamwise_residual_factor_operators) makes operators of them.
- StreamwiseOperators: whole operators on tensors of any shape and controllers (compiled and triton, whose kernels form
  the sigmoids themselves).

streamwise_residual_autograd asks streamwise_residual_backends for operators once per call, in the forward; its backward
uses the same ones.

Tensor names: n tokens, k streams, d branch width, p padded controller; a bare x or y has shape [..., K*D], u and z
[..., D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_controllers import Controller
from megatron.core.transformer.streamwise_residual_norm import NormCall


class StreamwiseKernels(Protocol):
    """Kernels that take factors. Inputs are contiguous; factors have the dtype in which sums are accumulated."""

    def read_forward(self, x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype) -> Tensor:
        """z_nd = sum_k f_k X_k."""

    def read_backward(
        self, grad_z_nd: Tensor, x_nkd: Tensor | None, factor_k: Tensor, x_dtype: torch.dtype, *, wants_grad_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(f_k gZ in x_dtype, sum_nd X_k gZ); the first is None unless wanted, the second where x_nkd is."""

    def write_forward(self, x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
        """y_nkd = g_k X_k + w_k u in the dtype of X."""

    def write_backward(
        self,
        grad_y_nkd: Tensor,
        x_nkd: Tensor | None,
        u_nd: Tensor | None,
        factor_k: Tensor,
        retention_k: Tensor | None,
        u_dtype: torch.dtype,
        *,
        wants_grad_u: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(g_k gY_k, sum_k w_k gY_k in u_dtype, sum_nd u gY_k, sum_nd X_k gY_k).

        An entry is None where retention_k is None, wants_grad_u is False, u_nd or x_nkd is None, in this order. Sums
        over tokens are fp64.
        """


@dataclass(frozen=True)
class StreamwiseUpdate:
    """What a write adds: u, or dropout(u + bias) with one mask for all streams where the backend fuses these.

    Args:
        u: [..., D]; None in a backward that does not need it.
        dtype: that of u.
        bias_d: [D] or None.
        dropout: probability of a zero.
        seed: [1] int64 on the device of u: what the mask is made of. None without dropout.
    """

    u: Tensor | None
    dtype: torch.dtype
    bias_d: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    def tensor(self) -> Tensor:
        """u, which must be there."""
        assert self.u is not None, "the update was not saved"
        return self.u


class WriteGradients(NamedTuple):
    """Gradients of a write; None where not wanted. grad_u is that of `u` before bias and dropout.

    The bias's may be left None where it is wanted: then it is the sum of grad_u over the tokens.
    """

    grad_x: Tensor | None
    grad_u: Tensor | None
    grad_write_p: Tensor | None
    grad_retention_p: Tensor | None
    grad_bias_d: Tensor | None = None


class WriteReadGradients(NamedTuple):
    """Gradients of a write and the read after it; grad_retention_p is None without retention, grad_bias_d as there."""

    grad_x: Tensor
    grad_u: Tensor
    grad_write_p: Tensor
    grad_retention_p: Tensor | None
    grad_read_p: Tensor
    grad_bias_d: Tensor | None = None

    @classmethod
    def of(cls, write: WriteGradients, grad_read_p: Tensor | None) -> WriteReadGradients:
        """Those of a write, of which all but retention's are there, and of the read behind it."""
        grad_x, grad_u, grad_write_p, grad_retention_p, grad_bias_d = write
        assert grad_x is not None
        assert grad_u is not None
        assert grad_write_p is not None
        assert grad_read_p is not None
        return cls(grad_x, grad_u, grad_write_p, grad_retention_p, grad_read_p, grad_bias_d)


class StreamwiseOperators(Protocol):
    """Whole operators. Every tensor may have any strides.

    With a norm, given only where `fuses_norm`, z is norm(z) of z as it would have been stored, and gZ the gradient of
    that; a forward sets the call's statistics, a backward its gradients.
    """

    name: str
    fuses_dropout: bool
    """Whether dropout of a StreamwiseUpdate is honoured, with a bias in it; where not, callers apply it before."""
    max_streams: int | None
    """The largest K; None for any."""

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log: "one kernel", "composed", ..."""

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        """Whether reads of this width and these dtypes of stream, z and sums take a norm."""

    def fuses_bias(self, stream_dtype: torch.dtype, branch_dtype: torch.dtype) -> bool:
        """Whether writes of these dtypes honour the bias of a StreamwiseUpdate, [D] and in the dtype of u, where there
        is no dropout; where not, callers add it before."""

    def read_forward(self, x: Tensor, read: Controller, z_dtype: torch.dtype, norm: NormCall | None = None) -> Tensor:
        """z = sum_k f_k X_k."""

    def read_backward(
        self,
        grad_z: Tensor,
        x: Tensor | None,
        read: Controller,
        x_dtype: torch.dtype,
        *,
        wants_grad_x: bool,
        through: Tensor | None = None,
        norm: NormCall | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(dX in x_dtype where wanted, gradient of the controller where x is given); a norm's backward needs x.

        `through` is another gradient of X, to which dX is added once it is rounded: the bits of two operations.
        """

    def write_forward(
        self, x: Tensor, update: StreamwiseUpdate, write: Controller, retention: Controller | None
    ) -> Tensor:
        """Y_k = g_k X_k + w_k u."""

    def write_backward(
        self,
        grad_y: Tensor,
        x: Tensor | None,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        *,
        wants_grad_x: bool,
        wants_grad_u: bool,
    ) -> WriteGradients:
        """The write's gradient needs update.u, retention's needs x; without retention dX is grad_y itself."""

    def write_read_forward(
        self,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        z_dtype: torch.dtype,
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(Y, z = sum_k r_k Y_k)."""

    def write_read_backward(
        self,
        grad_y: Tensor,
        grad_z: Tensor,
        x: Tensor,
        update: StreamwiseUpdate,
        write: Controller,
        retention: Controller | None,
        read: Controller,
        norm: NormCall | None = None,
    ) -> WriteReadGradients:
        """All gradients of both, Y computed again."""
