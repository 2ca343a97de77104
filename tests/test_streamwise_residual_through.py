"""A stream that passes through its read has the gradients, bit for bit, of a stream used twice, on every backend.

    pytest tests/test_streamwise_residual_through.py

Tensor names: k streams, d branch width.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from harness_triton import normal, triton_device

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE, streamwise_backend
from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read, streamwise_sigmoid_read_through

K, D = 3, 35


@pytest.fixture(params=["compiled", "eager", "triton"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Every test runs on all backends, Triton through its interpreter where there is no GPU."""
    if request.param == "triton":
        return triton_device(monkeypatch)
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    return torch.device("cpu")


def norms(dtype: torch.dtype, device: torch.device) -> list[StreamNorm | None]:
    weight_d, bias_d = (normal(D, dtype=dtype, seed=seed, device=device) for seed in (8, 9))
    return [None, StreamNorm("RMSNorm", D, 1e-5, weight_d), StreamNorm("LayerNorm", D, 1e-5, weight_d, bias_d)]


@pytest.mark.parametrize(
    ("stream", "branch"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=["fp32", "fp32 stream", "bf16"],
)
def test_a_stream_that_passes_through_its_read_has_the_gradients_of_one_used_twice(
    stream: torch.dtype, branch: torch.dtype, device: torch.device
) -> None:
    read_p = normal(128, dtype=torch.float32, seed=2, device=device)
    truncates = device.type == "cpu" and streamwise_backend(device) == "triton"  # the interpreter, where bf16 is stored
    for norm, spread in itertools.product(norms(branch, device), (False, True)):
        results = []
        for passes in (False, True):
            x = normal(5, 2, K * D, dtype=stream, seed=1, device=device)
            if passes:
                z, stream_after = streamwise_sigmoid_read_through(x, read_p, K, output_dtype=branch, norm=norm)
                assert stream_after.data_ptr() == x.data_ptr(), "the stream was copied"
            else:
                z, stream_after = streamwise_sigmoid_read(x, read_p, K, output_dtype=branch, norm=norm), x
            grad_z = normal(*z.shape, dtype=branch, seed=3, device=device)
            grad_x = normal(*x.shape, dtype=stream, seed=4, device=device)
            if spread:  # rows that are not next to each other
                grad_x = grad_x.detach().transpose(0, 1).contiguous().transpose(0, 1)
            parameters = [] if norm is None else [p for p in (norm.weight_d, norm.bias_d) if p is not None]
            wanted = [x, read_p, *parameters]
            results.append([z, *torch.autograd.grad([z, stream_after], wanted, [grad_z.detach(), grad_x.detach()])])
        for found, expected in zip(*reversed(results), strict=True):
            if truncates and found.dtype is torch.bfloat16:
                torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0)
                continue
            assert torch.equal(found, expected), f"other bits with {norm and norm.kind}, spread {spread}"


def test_a_use_without_gradient_leaves_the_other_ones(device: torch.device) -> None:
    x, read_p = (normal(*shape, dtype=torch.float32, seed=1, device=device) for shape in ((4, K * D), (K,)))
    z, after = streamwise_sigmoid_read_through(x, read_p, K)
    (alone,) = torch.autograd.grad(streamwise_sigmoid_read(x, read_p, K).sum(), x)
    assert torch.equal(torch.autograd.grad(z.sum(), x, retain_graph=True)[0], alone)
    found = torch.autograd.grad(after.sum(), [x, read_p], allow_unused=True)
    assert torch.equal(found[0], torch.ones_like(x))
    assert found[1] is None


def test_a_stream_without_gradient_passes_as_it_is_and_with_the_same_result(device: torch.device) -> None:
    x, read_p = (normal(*shape, dtype=torch.float32, seed=1, device=device) for shape in ((4, K * D), (K,)))
    wanted = streamwise_sigmoid_read(x, read_p, K)
    frozen = x.detach()
    z, after = streamwise_sigmoid_read_through(frozen, read_p, K)
    assert after is frozen, "a stream that needs no gradient must not get one from its read"
    assert torch.equal(z, wanted)
    assert z.requires_grad
    with torch.no_grad():
        z, after = streamwise_sigmoid_read_through(x, read_p, K)
    assert torch.equal(z, wanted)
    assert torch.equal(after, x)
