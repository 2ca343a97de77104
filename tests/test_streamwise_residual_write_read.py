"""The fused write and read, and bias and dropout of a write, give what the separate operations give.

    pytest tests/test_streamwise_residual_write_read.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_models import WIDTH, build_gpt, single_process_megatron, stream_operations
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE
from megatron.core.transformer.streamwise_residual_ops import (
    streamwise_sigmoid_read,
    streamwise_sigmoid_write_read,
    streamwise_sigmoid_writeback,
)

MAX_FORGET = 0.1


@pytest.fixture(params=["compiled", "eager"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on both CPU backends."""
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal values that require grad."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference in units of the largest wanted value."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("retained", [False, True], ids=["kept whole", "retention"])
@pytest.mark.parametrize(
    ("stream", "branch", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.float32, torch.bfloat16, 8e-3),
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
    ids=["fp32", "fp32 stream", "bf16"],
)
def test_write_and_read_in_one_pass_give_what_the_two_give(
    stream: torch.dtype, branch: torch.dtype, tolerance: float, retained: bool
) -> None:
    """The outputs bit for bit; gradients within the roundings that one pass saves."""
    k, d = 4, 70
    x, u = random(3, 7, k * d, dtype=stream, seed=1), random(3, 7, d, dtype=branch, seed=2)
    s, r, q = (random(128, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))
    options: dict[str, Any] = {"retention_logits": q, "retention_max_forget": MAX_FORGET} if retained else {}
    y_fused, z_fused = streamwise_sigmoid_write_read(x, u, s, r, k, output_dtype=branch, **options)
    y = streamwise_sigmoid_writeback(x, u, s, k, **options)
    z = streamwise_sigmoid_read(y, r, k, output_dtype=branch)
    assert torch.equal(y_fused, y), "Y of the fused operator has other bits"
    assert torch.equal(z_fused, z), "z of the fused operator has other bits"
    inputs = [x, u, s, r, *([q] if retained else [])]
    grad_y, grad_z = random(*y.shape, dtype=stream, seed=6).detach(), random(*z.shape, dtype=branch, seed=7).detach()
    wanted = torch.autograd.grad([y, z], inputs, [grad_y, grad_z])
    found = torch.autograd.grad([y_fused, z_fused], inputs, [grad_y, grad_z])
    for name, a, b in zip("xusrq", found, wanted, strict=False):
        assert a.dtype is b.dtype
        error = relative_error(a, b)
        assert error <= tolerance, f"gradient of {name} is off by {error}"


def test_bias_and_dropout_stand_before_the_write_with_one_mask_for_all_streams() -> None:
    k, d, p = 3, 64, 0.25
    x, u = random(40, k * d, dtype=torch.float32, seed=1), random(40, d, dtype=torch.float32, seed=2)
    bias, s = random(d, dtype=torch.float32, seed=3), torch.zeros(128)
    torch.manual_seed(5)
    y = streamwise_sigmoid_writeback(x, u, s, k, bias=bias, dropout_probability=p)
    torch.manual_seed(5)
    again, _ = streamwise_sigmoid_write_read(x, u, s, s, k, bias=bias, dropout_probability=p)
    assert torch.equal(y, again), "the same generator state must drop the same elements"
    added_nkd = (y - x).detach().view(40, k, d)
    kept_nd = added_nkd[:, 0] != 0
    assert 0.65 < kept_nd.float().mean() < 0.85, "about three quarters are kept"
    wanted_nkd = torch.where(kept_nd, (u + bias).detach() / (1 - p), 0.0)[:, None].expand(-1, k, -1)
    torch.testing.assert_close(added_nkd, wanted_nkd, rtol=1e-5, atol=1e-5)
    grad_u, grad_bias = torch.autograd.grad(y.sum(), (u, bias))
    torch.testing.assert_close(grad_u, torch.where(kept_nd, k / (1 - p), 0.0))
    torch.testing.assert_close(grad_bias, grad_u.sum(0))


def test_a_layer_reads_its_stream_twice_not_three_times_and_gives_the_bits_of_its_halves() -> None:
    """Its own forward writes the attention's output and reads the MLP's input in one operation; the halves do not."""
    with single_process_megatron():
        model = build_gpt(4, num_layers=1, hidden_dropout=0.1)
        layer = model.decoder.layers[0]
        mask = torch.ones(1, 1, 8, 8).triu(1).bool()
        x_sbw = random(8, 2, 4 * WIDTH, dtype=torch.float32, seed=1)
        torch.manual_seed(3)
        whole, _ = layer(x_sbw, attention_mask=mask)
        torch.manual_seed(3)
        halves = layer._forward_mlp(layer._forward_attention(x_sbw, attention_mask=mask)[0])
        operations = stream_operations(whole)
    assert torch.equal(whole, halves), "the layer differs from its two halves"
    assert operations == {"StreamwiseRead": 1, "StreamwiseWrite": 1, "StreamwiseWriteRead": 1}


X, U, L = torch.ones(2, 8), torch.ones(2, 2), torch.zeros(4)
MISUSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "wide bias": ({"bias": torch.ones(8)}, ValueError, r"bias must broadcast to .*\(2, 2\).*got \(8,\)"),
    "integer bias": ({"bias": torch.ones(2).int()}, TypeError, "bias must have a floating dtype"),
    "bias elsewhere": ({"bias": torch.ones(2, device="meta")}, ValueError, "bias must be on .*cpu, got meta"),
    "negative dropout": ({"dropout_probability": -0.1}, ValueError, r"lie in \[0, 1\], got -0.1"),
    "dropout of a string": ({"dropout_probability": "0.1"}, TypeError, "must be a float, got str"),
    "short read logits": ({"read_logits": L[:2]}, ValueError, "read_logits must have at least 4"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_each_misuse_has_its_own_error(misuse: str) -> None:
    options, error, message = MISUSES[misuse]
    read_logits = options.get("read_logits", L)
    rest = {name: value for name, value in options.items() if name != "read_logits"}
    with pytest.raises(error, match=message):
        streamwise_sigmoid_write_read(X, U, L, read_logits, 4, **rest)
