"""The streamwise operators through compiled code for the CPU, streamwise_residual_torch.cpp and the kernels below it.

    operators = CompiledOperators(load_library())          # streamwise_residual_library builds it at first use
    z = operators.read(x, read_logits_p, None, num_streams=4, is_logit=True, z_dtype=torch.bfloat16, passes=False)

Chosen by streamwise_residual_backends for CPU tensors. A call is one operator of PyTorch, whose autograd node is C++
too: it forms the factors and goes over the streams once; the backward makes the gradients of controllers and norms as
well.

What always holds: results are the same bits for any number of threads. Pairs of dtypes that the source does not
instantiate (those with fp16) run on the eager kernels.

Tensor names: d branch width, p padded controller; x and y have shape [..., K*D], u and z [..., D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_autograd import AutogradOperators, sum_dtype_of
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import WriteOptions

_HALF_OR_SINGLE = (torch.float32, torch.bfloat16)
_PAIRS = {*((x, u) for x in _HALF_OR_SINGLE for u in _HALF_OR_SINGLE), (torch.float64, torch.float64)}
"""Dtypes of a stream and a branch that there are kernels for: STREAMWISE_TYPES of streamwise_residual_kernels.h."""
_NORMS = {"RMSNorm": 1, "LayerNorm": 2}
_NO_NORM = (None, None), (0, 0.0)


class CompiledOperators:
    """StreamwiseOperators (streamwise_residual_protocol) for CPU tensors, through the library."""

    name = "compiled"
    fuses_dropout = False
    max_streams: int | None = None

    def __init__(self, library: Any) -> None:
        self._read, self._read_through = library.read.default, library.read_through.default
        self._write, self._write_read = library.write.default, library.write_read.default
        self._eager = AutogradOperators(FactorOperators("eager", streamwise_residual_kernels))

    def paths(self) -> dict[str, str]:
        """How each operator runs, for the log."""
        one = "in one pass"
        return {
            "read": self.name,
            "write": self.name,
            **dict.fromkeys(("write and read", "read and norm", "bias and write"), one),
            "dropout": "PyTorch",
        }

    def fuses_norm(
        self, width: int, stream_dtype: torch.dtype, branch_dtype: torch.dtype, sum_dtype: torch.dtype
    ) -> bool:
        del width  # a row of any width stays in cache
        return _serves(stream_dtype, branch_dtype, sum_dtype)

    def fuses_bias(self, stream_dtype: torch.dtype, branch_dtype: torch.dtype) -> bool:
        is_as_wide = torch.promote_types(stream_dtype, branch_dtype) is stream_dtype
        return is_as_wide and (stream_dtype, branch_dtype) in _PAIRS

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
        if not _serves(x.dtype, z_dtype, sum_dtype_of(x, read_p)):
            return self._eager.read(
                x, read_p, norm, num_streams=num_streams, is_logit=is_logit, z_dtype=z_dtype, passes=passes
            )
        operator = self._read_through if passes else self._read
        parameters, kind = _arguments(norm)
        return operator(x, read_p, *parameters, num_streams, is_logit, z_dtype, *kind)

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
        if not _serves(x.dtype, u.dtype, sum_dtype_of(x, u, write_p, retention_p)):
            return self._eager.write(x, u, bias_d, seed, write_p, retention_p, options)
        settings = options.num_streams, options.is_logit, options.max_forget
        y: Tensor = self._write(x, u, write_p, retention_p, bias_d, *settings)
        return y

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
        sums = sum_dtype_of(x, u, write_p, retention_p, read_p)
        serves_u, serves_z = _serves(x.dtype, u.dtype, sums), _serves(x.dtype, z_dtype, sums)
        if not (serves_u or serves_z):
            return self._eager.write_read(x, u, bias_d, seed, write_p, retention_p, read_p, norm, options, z_dtype)
        if not (serves_u and serves_z):  # two operators, each by the kernels that it has alone
            k, is_logit = options.num_streams, options.is_logit
            y = self.write(x, u, bias_d, seed, write_p, retention_p, options)
            z = self.read(y, read_p, norm, num_streams=k, is_logit=is_logit, z_dtype=z_dtype, passes=False)
            return y, z
        parameters, kind = _arguments(norm)
        settings = options.num_streams, options.is_logit, options.max_forget
        tensors = (x, u, write_p, read_p, retention_p, bias_d, *parameters)
        y, z = self._write_read(*tensors, *settings, options.keeps_y, z_dtype, *kind)
        return y, z


def _serves(x: torch.dtype, u: torch.dtype, sums: torch.dtype) -> bool:
    """Whether there are kernels for these dtypes of stream, branch and sums."""
    return (x, u) in _PAIRS and (sums is torch.float64) == (x is torch.float64)


def _arguments(norm: StreamNorm | None) -> tuple[tuple[Tensor | None, Tensor | None], tuple[int, float]]:
    """(parameters, kind and eps) as the library takes a norm."""
    if norm is None:
        return _NO_NORM
    return (norm.weight_d, norm.bias_d), (_NORMS[norm.kind], norm.eps)
