"""Dropout in the Triton write: one mask for all streams, the same in the backward and wherever the call is repeated.

    pytest tests/test_streamwise_triton_dropout.py           # on a GPU compiled, else through Triton's interpreter

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import pytest
import torch
from harness_models import build_gpt, run, single_process_megatron, token_batch
from harness_triton import MAX_FORGET, normal, triton_device
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.streamwise_residual_ops import (
    streamwise_sigmoid_write_read,
    streamwise_sigmoid_writeback,
)

N, K, D = 33, 2, 40


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return triton_device(monkeypatch)


def inputs(device: torch.device) -> tuple[Tensor, ...]:
    """x, u, bias, write logits, read logits, retention logits."""
    shapes = ((N, K * D), (N, D), (D,), (K,), (K,), (K,))
    return tuple(
        normal(*shape, dtype=torch.float32, seed=seed, device=device) for seed, shape in enumerate(shapes, start=1)
    )


def mask_of(y: Tensor, x: Tensor) -> Tensor:
    """[n, d]: where a write without retention changed its stream; the same for every stream."""
    changed_nkd = (y != x).view(N, K, D)
    assert (changed_nkd == changed_nkd[:, :1]).all(), "streams have different masks"
    return changed_nkd[:, 0]


def test_kept_elements_are_scaled_and_gradients_see_the_mask_of_the_forward(device: torch.device) -> None:
    p = 0.25
    x, u, bias, s, _, _ = inputs(device)
    y = streamwise_sigmoid_writeback(x, u, s, K, bias=bias, dropout_probability=p)
    kept_nd = mask_of(y, x)
    assert 0.7 < kept_nd.float().mean() < 0.8, f"{kept_nd.float().mean()} of the elements are kept, wanted {1 - p}"
    assert len({tuple(row) for row in kept_nd.tolist()}) == N, "tokens share a mask"
    v_nd = torch.where(kept_nd, (u + bias) / (1 - p), 0.0)
    factor_k = 2 * s.sigmoid()
    wanted = (x.view(N, K, D) + factor_k[:, None] * v_nd[:, None]).flatten(1)
    torch.testing.assert_close(y, wanted)
    gradient = normal(N, K * D, dtype=torch.float32, seed=9, device=device).detach()
    variables = (x, u, bias, s)
    found, expected = (torch.autograd.grad(output, variables, gradient) for output in (y, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_write_and_read_in_one_pass_draw_the_same_mask_and_pass_its_gradients(device: torch.device) -> None:
    p = 0.5
    x, u, bias, s, r, q = inputs(device)
    retention = {"retention_logits": q, "retention_max_forget": MAX_FORGET}
    torch.manual_seed(3)
    alone = streamwise_sigmoid_writeback(x, u, s, K, bias=bias, dropout_probability=p, **retention)
    torch.manual_seed(3)
    y, z = streamwise_sigmoid_write_read(x, u, s, r, K, bias=bias, dropout_probability=p, **retention)
    assert torch.equal(y, alone), "the same generator state drew another mask"
    assert not torch.equal(streamwise_sigmoid_writeback(x, u, s, K, dropout_probability=p), alone)
    kept_nd = ((y - x.view(N, K, D).mul(1 - MAX_FORGET * torch.sigmoid(-q)[:, None]).flatten(1)).abs() > 1e-6)[:, :D]
    v_nd = torch.where(kept_nd, (u + bias) / (1 - p), 0.0)
    retained = x.view(N, K, D) * (1 - MAX_FORGET * torch.sigmoid(-q))[:, None]
    wanted_y = (retained + 2 * s.sigmoid()[:, None] * v_nd[:, None]).flatten(1)
    wanted_z = (wanted_y.view(N, K, D) * r.sigmoid()[:, None]).sum(1)
    output_gradients = [normal(*output.shape, dtype=torch.float32, seed=9, device=device).detach() for output in (y, z)]
    found = torch.autograd.grad([y, z], (x, u, bias, s, r, q), output_gradients)
    expected = torch.autograd.grad([wanted_y, wanted_z], (x, u, bias, s, r, q), output_gradients)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_everything_is_dropped_at_one_and_nothing_at_zero(device: torch.device) -> None:
    x, u, _, s, _, _ = inputs(device)
    y = streamwise_sigmoid_writeback(x, u, s, K, dropout_probability=1.0)
    assert torch.equal(y, x)
    (grad_u,) = torch.autograd.grad(y.sum(), u)
    assert (grad_u == 0).all()
    plain = streamwise_sigmoid_writeback(x, u, s, K)
    assert torch.equal(streamwise_sigmoid_writeback(x, u, s, K, dropout_probability=0.0), plain)


def test_activation_checkpointing_repeats_the_mask(device: torch.device) -> None:
    x, u, bias, s, _, _ = inputs(device)

    def block(x: Tensor, u: Tensor) -> Tensor:
        return streamwise_sigmoid_writeback(x, u, s, K, bias=bias, dropout_probability=0.5).tanh()

    torch.manual_seed(3)
    plain = block(x, u)
    wanted = torch.autograd.grad(plain.sum(), (x, u, s))
    torch.manual_seed(3)
    repeated = checkpoint(block, x, u, use_reentrant=False)
    assert torch.equal(repeated, plain)
    assert all(map(torch.equal, torch.autograd.grad(repeated.sum(), (x, u, s)), wanted))


def test_replay_of_a_model_is_bit_equal_with_dropout(device: torch.device) -> None:
    """Two layers with biases, dropout and retention, with and without replay: losses and every gradient."""
    results = []
    with single_process_megatron():
        for replay in (False, True):
            model = build_gpt(
                2, replay=replay, hidden_dropout=0.2, num_layers=2, wide_options={"learned_retention": True}
            ).to(device)
            torch.manual_seed(5)
            loss = run(model, token_batch().to(device), token_batch(8).to(device)).mean()
            loss.backward()
            results.append({"loss": loss.detach()} | {name: param.grad for name, param in model.named_parameters()})
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), f"{name} differs under replay"
