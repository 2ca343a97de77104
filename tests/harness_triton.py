"""Where tests of Triton kernels run: compiled on a GPU, else on CPU tensors through Triton's interpreter.

    device = triton_device(monkeypatch)          # in a fixture, before anything imports our kernels

What always holds: the backend `triton` is chosen for the test; the interpreter is asked for only where there is no GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE

MAX_FORGET = 0.1
EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def triton_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Choose the Triton backend for the test; returns the device to make tensors on."""
    pytest.importorskip("triton", reason="triton comes with PyTorch on Linux alone")
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Normal values that require grad, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


def reference_read(x: Tensor, logits_p: Tensor, k: int) -> Tensor:
    """z = sum_k sigmoid(r_k) X_k."""
    return (x.unflatten(-1, (k, -1)) * logits_p[:k].sigmoid()[:, None]).sum(-2)


def reference_write(x: Tensor, v: Tensor, logits_p: Tensor, k: int, retention_p: Tensor | None) -> Tensor:
    """Y_k = g_k X_k + 2 sigmoid(s_k) v."""
    kept = x.unflatten(-1, (k, -1))
    if retention_p is not None:
        kept = kept * (1 - MAX_FORGET * torch.sigmoid(-retention_p[:k]))[:, None]
    return (kept + 2 * logits_p[:k].sigmoid()[:, None] * v.unsqueeze(-2)).flatten(-2)
