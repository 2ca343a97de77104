"""Each misuse of a streamwise operator is an error of its own, which names the argument and what is wanted.

    pytest tests/test_streamwise_residual_misuses.py

Checks come before the choice of kernels, so one backend stands for all.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.streamwise_residual_ops import (
    streamwise_read,
    streamwise_sigmoid_read,
    streamwise_sigmoid_writeback,
    streamwise_writeback,
)

X, U, L = torch.ones(2, 8), torch.ones(2, 2), torch.zeros(4)
MISUSES = {
    "bool streams": (lambda: streamwise_sigmoid_read(X, L, True), TypeError, "num_streams must be an int, got bool"),
    "float streams": (lambda: streamwise_sigmoid_read(X, L, 4.0), TypeError, "num_streams must be an int, got float"),  # type: ignore[arg-type]
    "no streams": (lambda: streamwise_sigmoid_read(X, L, 0), ValueError, "at least 1, got 0"),
    "indivisible": (lambda: streamwise_sigmoid_read(X, L, 3), ValueError, "multiple of the 3 streams, got 8"),
    "empty width": (lambda: streamwise_sigmoid_read(X[:, :0], L, 4), ValueError, "got 0 in shape"),
    "indivisible by factors": (lambda: streamwise_read(X, L[:3]), ValueError, "multiple of the 3 streams, got 8"),
    "scalar": (lambda: streamwise_sigmoid_read(X[0, 0], L, 4), ValueError, "at least one dimension"),
    "integers": (lambda: streamwise_sigmoid_read(X.long(), L, 4), TypeError, "floating dtype, got torch.int64"),
    "complex": (
        lambda: streamwise_sigmoid_read(X.to(torch.complex64), L, 4),
        TypeError,
        "floating dtype, got torch.complex64",
    ),
    "no tensor": (lambda: streamwise_sigmoid_read([1.0], L, 4), TypeError, "hidden_states must be a torch.Tensor"),  # type: ignore[arg-type]
    "short logits": (lambda: streamwise_sigmoid_read(X, L[:3], 4), ValueError, "at least 4 .*got 3"),
    "bf16 logits": (lambda: streamwise_sigmoid_read(X, L.bfloat16(), 4), TypeError, "controllers stay fp32"),
    "matrix of logits": (lambda: streamwise_sigmoid_read(X, L[None], 4), ValueError, r"vector, got shape \(1, 4\)"),
    "no logits": (lambda: streamwise_sigmoid_read(X, None, 4), TypeError, "read_logits must be a torch.Tensor"),  # type: ignore[arg-type]
    "no factors": (lambda: streamwise_read(X, L[:0]), ValueError, "at least 1 element"),
    "logits elsewhere": (lambda: streamwise_sigmoid_read(X, L.to("meta"), 4), ValueError, "device cpu, got meta"),
    "output dtype": (lambda: streamwise_sigmoid_read(X, L, 4, output_dtype=torch.int32), TypeError, "floating dtype"),
    "output string": (lambda: streamwise_sigmoid_read(X, L, 4, output_dtype="bf16"), TypeError, "torch.dtype or None"),  # type: ignore[arg-type]
    "update width": (lambda: streamwise_sigmoid_writeback(X, X, L, 4), ValueError, r"shape \(2, 2\).*got \(2, 8\)"),
    "update tokens": (lambda: streamwise_writeback(X, U[:1], L), ValueError, r"shape \(2, 2\).*got \(1, 2\)"),
    "integer update": (lambda: streamwise_writeback(X, U.int(), L), TypeError, "branch_update must have a floating"),
    "update elsewhere": (lambda: streamwise_writeback(X, U.to("meta"), L), ValueError, "device cpu, got meta"),
    "write logits": (lambda: streamwise_sigmoid_writeback(X, U, L[:2], 4), ValueError, "write_logits must have at"),
    "retention factors": (
        lambda: streamwise_writeback(X, U, L, retention_factors=torch.ones(128)),
        ValueError,
        "4 in all, got 128",
    ),
    "retention logits": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_logits=L[:1], retention_max_forget=0.1),
        ValueError,
        "retention_logits must have at least 4",
    ),
    "no bound": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_logits=L),
        ValueError,
        "strictly between 0 and 1 when retention_logits are given, got 0.0",
    ),
    "bound of 1": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_logits=L, retention_max_forget=1.0),
        ValueError,
        "strictly between 0 and 1",
    ),
    "bound without retention": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_max_forget=-0.1),
        ValueError,
        "at least 0 and below 1, got -0.1",
    ),
    "nan bound": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_max_forget=math.nan),
        ValueError,
        "at least 0 and below 1, got nan",
    ),
    "bool bound": (
        lambda: streamwise_sigmoid_writeback(X, U, L, 4, retention_logits=L, retention_max_forget=True),
        TypeError,
        "retention_max_forget must be a float, got bool",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_each_misuse_has_its_own_error(misuse: str) -> None:
    call, error, message = MISUSES[misuse]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("kind", "eps", "weight", "bias", "error", "message"),
    [
        ("Foo", 1e-5, None, None, ValueError, "norm.kind must be 'RMSNorm' or 'LayerNorm', got 'Foo'"),
        ("RMSNorm", None, None, None, TypeError, "norm.eps must be a float, got NoneType"),
        ("RMSNorm", 1e-5, None, torch.ones(2), ValueError, "norm.bias_d must be None for an RMSNorm"),
        ("LayerNorm", 1e-5, [1.0, 1.0], None, TypeError, "norm.weight_d must be a floating torch.Tensor"),
        ("LayerNorm", 1e-5, torch.ones(2, dtype=torch.int32), None, TypeError, "norm.weight_d must be a floating"),
        ("LayerNorm", 1e-5, torch.ones(3), None, ValueError, r"norm.weight_d must have shape \(2,\), got \(3,\)"),
    ],
)
def test_a_norm_that_is_none_is_refused_by_field(
    kind: Any, eps: Any, weight: Any, bias: Any, error: type[Exception], message: str
) -> None:
    norm = StreamNorm(kind, 2, eps, weight, bias)
    with pytest.raises(error, match=message):
        streamwise_sigmoid_read(torch.ones(3, 8), torch.zeros(4), 4, norm=norm)
