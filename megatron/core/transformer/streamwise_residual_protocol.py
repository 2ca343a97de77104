"""What a backend of the streamwise operators implements, at one of three levels.

- StreamwiseKernels: functions of contiguous tensors and factors (eager). FactorOperators
  (streamwise_residual_factor_operators) makes passes of them.
- StreamwisePasses: forwards and backwards on tensors of any shape and controllers (triton, whose kernels form the
  sigmoids themselves). AutogradOperators (streamwise_residual_autograd) makes operators of them.
- StreamwiseOperators: differentiable operators (compiled, whose autograd nodes are C++). streamwise_residual_ops asks
  streamwise_residual_backends for them once per call; the backward of a call is that of its forward.

Tensor names: n tokens, k streams, d branch width, p padded controller; a bare x or y has shape [..., K*D], u and z
[..., D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_controllers import Controller, ControllerKind
from megatron.core.transformer.streamwise_residual_norm import NormCall, StreamNorm


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


class StreamwiseTraits(Protocol):
    """What a backend does in one pass with a read or write, and for how many streams."""

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


class StreamwisePasses(StreamwiseTraits, Protocol):
    """Forwards and backwards of whole operators. Every tensor may have any strides.

    With a norm, given only where `fuses_norm`, z is norm(z) of z as it would have been stored, and gZ the gradient of
    that; a forward sets the call's statistics, a backward its gradients.
    """

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


class WriteOptions(NamedTuple):
    """What a write is told beside tensors.

    With `keeps_y` a write and read keeps Y for its backward and not X. That is for a Y that is kept anyway, as the
    input of the next layer, and for writes without retention, whose gradients do not need X.
    """

    num_streams: int
    is_logit: bool
    max_forget: float = 0.0
    dropout: float = 0.0
    keeps_y: bool = False

    def controllers(
        self, sum_dtype: torch.dtype, write_p: Tensor, retention_p: Tensor | None
    ) -> tuple[Controller, Controller | None]:
        """(write, retention or None)."""
        write = Controller(write_p, self.num_streams, "write" if self.is_logit else "factor", sum_dtype)
        if retention_p is None:
            return write, None
        kind: ControllerKind = "retention" if self.is_logit else "factor"
        return write, Controller(retention_p, self.num_streams, kind, sum_dtype, self.max_forget)


class StreamwiseOperators(StreamwiseTraits, Protocol):
    """Whole operators, differentiable once. Every tensor may have any strides; a norm is given only where `fuses_norm`.

    Controllers are logits where `is_logit`, else the factors themselves. Without retention the gradient of a write's
    stream is the incoming gradient itself.
    """

    def read(
        self,
        x: Tensor,
        read_p: Tensor,
        norm: StreamNorm | None,
        *,
        num_streams: int,
        is_logit: bool,
        z_dtype: torch.dtype,
        passes: bool,
    ) -> Any:
        """z = sum_k f_k X_k, or its norm. With `passes` (z, X): what uses that X has its gradient added to the read's
        in the one pass of the backward, with the bits of autograd's own addition."""

    def write(
        self,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        options: WriteOptions,
    ) -> Tensor:
        """Y_k = g_k X_k + w_k u; the bias is given only where `fuses_bias`, seed and dropout where `fuses_dropout`."""

    def write_read(
        self,
        x: Tensor,
        u: Tensor,
        bias_d: Tensor | None,
        seed: Tensor | None,
        write_p: Tensor,
        retention_p: Tensor | None,
        read_p: Tensor,
        norm: StreamNorm | None,
        options: WriteOptions,
        z_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """(Y, z = sum_k f_k Y_k or its norm), with the bits of a write and a read. Y is computed again in the backward,
        unless `keeps_y`: then gradients have the bits of the two operators, too."""
